"""Loads the tokenizer, checks that it is the model's, finds the stop tokens, templates chats."""

from __future__ import annotations

import datetime
import functools
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.data.chat import Message
from vapo_megatron.errors import ConfigError, DataError
from vapo_megatron.rollout.special_tokens import check_nothing_behind

VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
_NAME_EOS = ("generation_config.json", "config.json")


def load_tokenizer(hf_path: str | Path, field: str = "model.hf_path") -> Any:
    """Load a tokenizer with transformers, running no code from the checkpoint.

    tokenizer.json is used as it is. transformers' AutoTokenizer would not: if config.json says
    Qwen2, it builds Qwen2's byte-level pipeline around any vocabulary, and silently encodes to
    different ids, or to none.

    Args:
        hf_path: a directory, read without network, or the id of a model on the Hugging Face hub.
        field: or option that gave it, for messages.

    Raises:
        ConfigError: no such directory, no vocabulary in it (transformers would build an empty one),
            ids that differ from those of its sentencepiece model, or a token behind every text.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    directory = Path(hf_path)
    local = directory.is_dir()
    if not local and not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", str(hf_path)):
        raise ConfigError(f"{field}={hf_path}: no such directory; give a Hugging Face directory")
    if local and not any((directory / name).is_file() for name in VOCABULARY_FILES):
        raise ConfigError(
            f"{field}={hf_path}: no tokenizer; the directory must hold one of "
            f"{', '.join(VOCABULARY_FILES)}"
        )
    as_written = (directory / "tokenizer.json").is_file()
    try:
        tokenizer = (PreTrainedTokenizerFast if as_written else AutoTokenizer).from_pretrained(
            str(hf_path), local_files_only=local, trust_remote_code=False
        )
    except Exception as error:  # The tokenizers library raises bare Exception on a broken file.
        raise ConfigError(
            f"{field}={hf_path}: its tokenizer does not load: "
            f"{' '.join(str(error).split())}; fetch its tokenizer's files again"
        ) from error
    if (directory / "tokenizer.model").is_file():
        _check_sentencepiece(tokenizer, directory / "tokenizer.model")
    check_nothing_behind(hf_path, tokenizer, field)
    return tokenizer


def _check_sentencepiece(tokenizer: Any, file: Path) -> None:
    """Compare the vocabulary, and the ids of a text that contains every piece.

    transformers picks the class from config.json, and may silently renumber the pieces or read a
    unigram model as BPE.
    """
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor()
    try:
        model.Load(str(file))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{file} is not a sentencepiece model: {error}") from None
    ids = list(range(model.GetPieceSize()))
    tokens = tokenizer.convert_ids_to_tokens([i for i in ids if i < len(tokenizer)])
    text = model.DecodeIds([i for i in ids if not (model.IsControl(i) or model.IsUnknown(i))])
    encoded = tokenizer.encode(text, add_special_tokens=False)
    if tokens != [model.IdToPiece(i) for i in ids] or encoded != model.EncodeAsIds(text):
        raise ConfigError(
            f"{file}: {type(tokenizer).__name__}, which transformers chose for this directory, "
            "gives other ids than sentencepiece; add a tokenizer.json with the same ids"
        )


def check_tokenizer(
    hf_path: str | Path, tokenizer: Any, configured: Sequence[int], vocab_size: int
) -> tuple[int, ...]:
    """Check that a tokenizer belongs to the model; return the ids that end a response, sorted.

    Those of generation_config.json, config.json and the tokenizer count, but of a run's export
    those of the run, unless its generation_config.json has been changed.

    Args:
        hf_path: directory whose generation_config.json and config.json are read.
        tokenizer: its eos_token_id counts too.
        configured: rollout.stop_token_ids; if not empty, only these count.
        vocab_size: rows of the model's vocabulary.

    Raises:
        ConfigError: the tokenizer has an id outside the model's vocabulary or lacks a stop token of
            the model; no stop token is known; or a configured one is outside the vocabulary.
    """
    # Imported here, because it loads torch.
    from vapo_megatron.weights.hf_directory import exported_stop_tokens

    tokens = {i: token for token, i in tokenizer.get_vocab().items()}
    largest = max(tokens, default=-1)
    if largest >= vocab_size:
        raise ConfigError(
            f"model.hf_path={hf_path}: its tokenizer has token id {largest} ({tokens[largest]!r}), "
            f"outside config.json's vocab_size={vocab_size}; put the model's own tokenizer there"
        )
    if configured:
        wrong = sorted(i for i in configured if not 0 <= i < vocab_size)
        if wrong:
            raise ConfigError(
                f"rollout.stop_token_ids: {wrong} are outside the model's vocabulary of "
                f"{vocab_size}; set the ids that end a response"
            )
        return tuple(sorted(set(configured)))

    stop: set[int] = set()
    for name in _NAME_EOS:
        eos = _eos(Path(hf_path) / name)
        unknown = sorted(eos - set(tokens))
        if unknown:
            raise ConfigError(
                f"model.hf_path={hf_path}: {name} has eos_token_id={unknown[0]}, which its "
                f"tokenizer lacks (the largest id is {largest}); put the model's own tokenizer "
                "there, or set rollout.stop_token_ids"
            )
        stop |= eos
    # An export records the run's ids; an edited generation_config.json overrides them.
    of_run = exported_stop_tokens(Path(hf_path))
    if of_run and of_run == _eos(Path(hf_path) / _NAME_EOS[0]):
        return tuple(sorted(of_run))
    if tokenizer.eos_token_id is not None:
        stop.add(tokenizer.eos_token_id)
    if not stop:
        raise ConfigError(
            f"model.hf_path={hf_path}: neither generation_config.json nor config.json nor the "
            "tokenizer names an end-of-sequence token; set rollout.stop_token_ids"
        )
    return tuple(sorted(stop))


def check_same_tokenizer(tokenizer: Any, reward_hf_path: str) -> None:
    """Check that a reward model's token ids mean what the actor's do, by its vocabulary's file.

    A directory without one is accepted.

    Raises:
        ConfigError: a token has another id; names one.
    """
    files = (Path(reward_hf_path, name) for name in ("tokenizer.json", "vocab.json"))
    file = next((f for f in files if f.is_file()), None)
    if file is None:
        return
    theirs = _vocabulary(file)
    ids = {i: token for token, i in theirs.items()}
    for token, i in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if theirs.get(token, i) != i or ids.get(i, token) != token:
            found = repr(ids[i]) if i in ids else "no token"
            raise ConfigError(
                f"model.reward_hf_path={reward_hf_path}: in {file.name} id {i} is {found}, but "
                f"{token!r} in model.hf_path's tokenizer: the reward model is given the actor's "
                "tokens; use a reward model with the actor's tokenizer"
            )


def _vocabulary(file: Path) -> dict[str, int]:
    """Return token -> id of a tokenizer.json or vocab.json. ConfigError: it is neither."""
    try:
        tree = json.loads(file.read_text())
        if file.name == "vocab.json":
            return dict(tree)
        vocabulary = tree["model"]["vocab"]
        if isinstance(vocabulary, list):  # A unigram model's pieces with their scores.
            vocabulary = {piece: i for i, (piece, _) in enumerate(vocabulary)}
        return {**vocabulary, **{t["content"]: t["id"] for t in tree.get("added_tokens") or ()}}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{file} is not a vocabulary: {error!r}; fetch it again") from None


def _eos(file: Path) -> set[int]:
    if not file.is_file():
        return set()
    try:
        value = json.loads(file.read_text()).get("eos_token_id")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is not a JSON object: {error}; fetch it again") from None
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ConfigError(
            f"{file}: eos_token_id={value!r} must be an integer or a list of integers; fetch the "
            "file again"
        )
    return set(ids)


class ChatTemplate:
    """Makes prompts of chat messages; called with messages, returns the text before the response.

    A prompt is encoded with the tokenizer's special tokens, so a begin token that the template
    writes too is left out of the text.

    Args:
        tokenizer: transformers'.
        date: what a template that asks for the time is told, in ISO form; None: today.
        tools: JSON schemas of the run's own, which every prompt tells of.

    Raises:
        DataError: when called, without a remedy. The tokenizer has no chat template, it refuses the
            messages or does not write a part of them, or its text would be encoded to other ids.
    """

    def __init__(self, tokenizer: Any, date: str | None = None, tools: Sequence[Any] = ()) -> None:
        self._tokenizer, self._tools = tokenizer, tools
        day = datetime.date.today() if date is None else datetime.date.fromisoformat(date)
        self._now = datetime.datetime.combine(day, datetime.time())
        self._complete: set[str] = set()
        """Shapes of messages of which the template leaves nothing out."""
        self.date: str | None = None
        """What was told to the template, in ISO form; None: it has not asked."""

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text, which ends with the generation prompt.

        A last message that is an assistant's ends it instead: the response continues it.

        Args:
            messages: see read_messages.
            tools, variables: of the row, see template_options.
        """
        begin = self._begin
        variables = variables or {}
        if tools and self._tools:
            raise DataError("it has tools of its own, and the run's environment has others")
        tools = tools or self._tools
        self._check_variables(variables, tools)
        if messages[-1]["role"] == "assistant":
            ending = {"add_generation_prompt": False, "continue_final_message": True}
            variables = {**variables, **ending}
        options = {**variables, **({"tools": list(tools)} if tools else {})}
        text = self.written(messages, **options)
        if tools and text == self.written(messages, **variables):
            raise DataError("the tokenizer's chat template does not write the tools given to it")
        # What is left out depends on the roles, not on the words: each shape is rendered once more.
        kinds = [(m["role"], bool(m["content"].strip()), "tool_calls" in m) for m in messages]
        shape = repr((kinds, options))
        if shape not in self._complete:
            self._check_contents(messages, options)
            self._complete.add(shape)
        for i, message in enumerate(messages):
            if "tool_calls" in message:
                self._check_calls(text, messages, i, options)
        return text.removeprefix(begin)

    def _check_variables(self, variables: Mapping[str, Any], tools: Sequence[Any]) -> None:
        """Refuse variables that the template does not have or that are not the row's to set."""
        if not variables:
            return
        source = self._tokenizer.get_chat_template(tools=list(tools) or None)
        taken = {*inspect.signature(self._tokenizer.apply_chat_template).parameters, "messages"}
        taken |= {"strftime_now", "raise_exception", *self._tokenizer.special_tokens_map}
        for name in variables:
            if name in taken:
                raise DataError(
                    f"its chat_template_kwargs sets {name}, which is not a row's to set"
                )
            if not re.search(rf"\b{re.escape(name)}\b", source):
                raise DataError(
                    f"its chat_template_kwargs has {name}, which the tokenizer's chat template "
                    "does not use"
                )

    def _check_contents(self, messages: Sequence[Message], options: Mapping[str, Any]) -> None:
        """Refuse a template that leaves out what a message says: a mark behind it is gone."""
        marks = {i: f" #{i}#" for i, m in enumerate(messages) if m["content"].strip()}
        marked = [{**m, "content": m["content"] + marks.get(i, "")} for i, m in enumerate(messages)]
        try:
            text = self.written(marked, **options)
        except DataError:
            return
        lost = next((i for i, mark in marks.items() if mark not in text), None)
        if lost is not None:
            role = messages[lost]["role"]
            what = "the tool's answer" if role == "tool" else f"the {role}'s text"
            raise DataError(
                f"the tokenizer's chat template does not write {what} of message {lost}"
            )

    def _check_calls(
        self, text: str, messages: Sequence[Message], i: int, options: Mapping[str, Any]
    ) -> None:
        """Refuse a template that writes the same without a message's calls."""
        other = {name: v for name, v in messages[i].items() if name != "tool_calls"}
        try:
            without = self.written([*messages[:i], other, *messages[i + 1 :]], **options)
        except DataError:
            return
        if without == text:
            raise DataError(
                f"the tokenizer's chat template does not write the tool_calls of message {i}"
            )

    def written(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """Return what the template writes, unchecked. Raises DataError: it refuses the messages."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt,
                strftime_now=self._strftime, **options,
            )  # fmt: skip
        except Exception as error:  # jinja2's, and whatever a template's calls raise.
            why = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"the tokenizer's chat template refuses them: {why}") from None
        return text

    def _strftime(self, form: str) -> str:
        """Take the place of transformers' clock: a run has one date, at midnight."""
        self.date = self._now.date().isoformat()
        return self._now.strftime(form)

    @functools.cached_property
    def _begin(self) -> str:
        """The begin token if encoding adds it, else empty."""
        tokenizer = self._tokenizer
        if not tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template")
        adds = tokenizer.encode("") == [tokenizer.bos_token_id]
        begin: str = tokenizer.bos_token if adds else ""
        text = self.written([{"role": "user", "content": "1 + 1"}]).removeprefix(begin)
        if tokenizer.encode(text) != tokenizer.encode(begin + text, add_special_tokens=False):
            raise DataError(
                "the tokenizer encodes its chat template's text with other special tokens around it"
            )
        return begin


def decode_responses(tokenizer: Any, responses: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of each response without special tokens, such as its stop token."""
    return tokenizer.batch_decode(
        [list(r) for r in responses], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )

"""Warnings about prompts and stop tokens that are valid but probably mistakes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vapo_megatron.errors import tell
from vapo_megatron.rollout.inputs import Inputs

_SAID = "1 + 1"


def tell_warnings(inputs: Inputs) -> None:
    """Print input_warnings on standard error."""
    for line in input_warnings(inputs):
        tell(f"warning: {line}")


def input_warnings(inputs: Inputs) -> list[str]:
    """Return warnings about what was read; empty for a replay, which reads no prompts."""
    datasets = [d for d in (inputs.dataset, inputs.held_out) if d is not None]
    lines = [
        f"{d.path}: {d.num_double_begin} prompts of {len(d)} start with the begin token, which the "
        "tokenizer adds too; the second is left out"
        for d in datasets
        if d.num_double_begin
    ]
    texts = (row.prompt for dataset in datasets for row in dataset.rows)
    turn = inputs.tokenizer and end_of_turn(inputs.tokenizer)
    stops = inputs.stop_token_ids
    if turn and turn[1] not in stops and _are_chats(inputs.tokenizer, texts):
        token, token_id = turn
        fixed = ",".join(map(str, sorted({*stops, token_id})))
        lines.append(
            f"the chat template ends a turn with {token} ({token_id}), which is no stop token "
            f"(they are {', '.join(map(str, stops))}): responses would go on behind it, up to the "
            f"length limit; set rollout.stop_token_ids=[{fixed}]"
        )
    return lines


def end_of_turn(tokenizer: Any) -> tuple[str, int] | None:
    """Return the special token, and its id, that a chat template ends an assistant's turn with.

    None: there is no template, or it ends a turn with other text.
    """
    turns = [{"role": "user", "content": _SAID}, {"role": "assistant", "content": "two"}]
    written = _written(tokenizer, turns, is_asked=False)
    behind = written.rpartition("two")[2] if "two" in written else ""
    found = [(behind.find(token), token) for token in _added_tokens(tokenizer) if token in behind]
    if not found:
        return None
    # Of two at one place the longer is what the tokenizer makes of it.
    _, token = min(found, key=lambda item: (item[0], -len(item[1])))
    return token, tokenizer.convert_tokens_to_ids(token)


def _are_chats(tokenizer: Any, texts: Iterable[str]) -> bool:
    """Return whether a prompt has what the chat template writes around a user's message."""
    written = _written(tokenizer, [{"role": "user", "content": _SAID}], is_asked=True)
    begin = tokenizer.bos_token
    marks = [t for t in _added_tokens(tokenizer) if t in written and t != begin]
    marks = marks or [part for part in [written.rpartition(_SAID)[2].strip()] if part]
    return any(mark in text for text in texts for mark in marks)


def _written(tokenizer: Any, messages: Sequence[Any], *, is_asked: bool) -> str:
    """Return what the template makes of messages; empty: there is none, or it refuses them."""
    if not tokenizer.chat_template:
        return ""
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_asked)
        )
    except Exception:  # jinja2's, and whatever a template's calls raise.
        return ""


def _added_tokens(tokenizer: Any) -> list[str]:
    """Return the texts of special tokens and others that are never split, but not spaces."""
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values()]
    return [token for token in tokens if token.strip()]

"""Tokenized prompts in a seeded order that depends only on (seed, epoch) and can be resumed."""

from __future__ import annotations

import array
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from vapo_megatron.data.order import seeded_permutation
from vapo_megatron.data.problems import Problem
from vapo_megatron.data.rollout import Prompt
from vapo_megatron.errors import DataError

OnProgress = Callable[[int, int], None]

SOURCES = "sources"
"""Key of the sources in a mixture's state_dict; that of one file has none."""

_PURPOSE = 1
"""Separates this order from other orders of the same seed."""


class PromptDataset:
    """Prompts, tokenized once, epoch by epoch; the same calls return the same ones on every rank.

    Args:
        problems: the data set, at least one.
        tokenize: text -> token ids, with the special tokens that a prompt starts with.
        path: the problems' file, named in errors.
        seed: of the order.
        source: the file's name in data.sources, which gives it an order of its own; None: the run
            has one file.
        first_index: `Prompt.index` of the first problem.
        shuffle: draw a new order in each epoch; otherwise the file's order.
        max_prompt_tokens: longest prompt allowed.
        begin: the token that a prompt begins with, once, or none; None: what tokenizing adds to an
            empty text.
        on_progress: called with (tokenized, all) problems.
        response_tokens: the ids of a problem's given response; None: responses are sampled.
        left_out: see leave_out.
        begun: the tokens that a problem's response starts with, which follow those of its prompt;
            None: none.

    Raises:
        DataError: a prompt has no tokens or too many, a response is refused, or nothing is left.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        tokenize: Callable[[str], Sequence[int]],
        *,
        path: str,
        seed: int,
        shuffle: bool,
        max_prompt_tokens: int,
        source: str | None = None,
        first_index: int = 0,
        begin: Sequence[int] | None = None,
        on_progress: OnProgress | None = None,
        response_tokens: Callable[[Problem], array.array[int]] | None = None,
        left_out: Mapping[int, str] | None = None,
        begun: Callable[[Problem], Sequence[int]] | None = None,
    ) -> None:
        self.path = path
        self._rows = list(problems)
        self._seed = seed
        self._source = source
        self._keys = () if source is None else (_key(source),)
        self._first_index = first_index
        self._shuffle = shuffle
        self._fingerprint = _fingerprint(self._rows)
        self._begin = begin
        self.num_double_begin = 0
        """Prompts, the critic's own too, that began with more than one begin token."""
        self._token_ids: list[array.array[int]] = []
        self._critic_token_ids: list[array.array[int] | None] = []
        self._responses: list[array.array[int]] = []
        for index, problem in enumerate(self._rows):
            text, own = problem.prompt, problem.critic_prompt
            more = () if begun is None else begun(problem)
            self._token_ids.append(self._tokenized(index, text, tokenize, max_prompt_tokens, more))
            self._critic_token_ids.append(
                None if own is None else self._tokenized(index, own, tokenize, max_prompt_tokens)
            )
            if response_tokens is not None:
                try:
                    self._responses.append(response_tokens(problem))
                except DataError as error:
                    raise DataError(f"{self._where(index)}: {error}") from None
            if on_progress is not None:
                on_progress(index + 1, len(problems))
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)
        self.left_out: dict[int, str] = {}
        """Index of `rows` -> why it is never drawn."""
        self.leave_out(left_out or {})

    def _tokenized(
        self,
        index: int,
        text: str,
        tokenize: Callable[[str], Sequence[int]],
        limit: int,
        more: Sequence[int] = (),
    ) -> array.array[int]:
        # 4 bytes a token; a tuple of Python integers would take ten times as much.
        token_ids = array.array("i", tokenize(text))
        if token_ids[:1] == token_ids[1:2]:
            if self._begin is None:
                self._begin = tokenize("")
            with_one_begin = without_second_begin(token_ids, array.array("i", self._begin))
            self.num_double_begin += len(with_one_begin) < len(token_ids)
            token_ids = with_one_begin
        where = self._where(index)
        if not token_ids:
            raise DataError(f"{where} has no tokens: {text!r}; remove it")
        token_ids.extend(more)
        if len(token_ids) > limit:
            raise DataError(
                f"{where} has {len(token_ids)} tokens, more than rollout.max_prompt_tokens={limit}:"
                f" {text[:60]!r}...; raise the limit or remove the problem"
            )
        return token_ids

    def _where(self, index: int) -> str:
        return f"{self.path}: problem {index} (from 0)"

    def __len__(self) -> int:
        """Number of `rows`."""
        return len(self._rows)

    @property
    def problems(self) -> list[Prompt]:
        """Every problem once, in the file's order, without those that are left out."""
        return [self._prompt(index) for index, _ in self.kept]

    @property
    def kept(self) -> list[tuple[int, Problem]]:
        """Those of `rows` that are not left out, with their indices."""
        return [(i, row) for i, row in enumerate(self._rows) if i not in self.left_out]

    @property
    def rows(self) -> Sequence[Problem]:
        """Every problem as it was read, in the file's order."""
        return self._rows

    def assign(self, verifiers: Mapping[int, str]) -> None:
        """Let these of `rows` name these verifiers."""
        for index, verifier in verifiers.items():
            self._rows[index] = self._rows[index].judged_by(verifier)

    def leave_out(self, reasons: Mapping[int, str]) -> None:
        """Draw these of `rows` no more; the others' order, positions and indices stay.

        Args:
            reasons: index -> what is wrong with the row.

        Raises:
            DataError: nothing is left.
        """
        self.left_out = {**reasons, **self.left_out}
        if len(self.left_out) == len(self._rows):
            raise DataError(
                f"{self.path}: all {len(self._rows)} rows are left out (data.skip_unusable=true): "
                f"the first {self.left_out[0]}; give data that the verifier can judge"
            )

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of one of `rows`, left out or not."""
        return self._prompt(index - self._first_index)

    def response(self, prompt: Prompt) -> array.array[int]:
        """Return the token ids of the response that the data give to one of `problems`."""
        return self._responses[prompt.index - self._first_index]

    def row(self, index: int) -> tuple[str, int]:
        """Return the file and the row (from 0) of one of `rows`."""
        return self.path, index

    def tokens(self, index: int) -> Sequence[int]:
        """Return the token ids of one of `rows`."""
        return self._token_ids[index]

    def next(self, count: int, step: int = 0) -> list[Prompt]:
        """Return the next prompts, in any step; after the end of an epoch the next one starts."""
        picked: list[int] = []
        while len(picked) < count:
            if self._position == len(self._rows):
                self._epoch += 1
                self._position = 0
                self._order = self._order_of(self._epoch)
            end = min(self._position + count - len(picked), len(self._rows))
            part = self._order[self._position : end]
            picked += [index for index in part if index not in self.left_out]
            self._position = end
        return [self._prompt(index) for index in picked]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next prompt as JSON values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "count": len(self._rows),
            "fingerprint": self._fingerprint,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that a state_dict belongs to this data set, and change nothing.

        Raises:
            DataError: it belongs to another data set, seed or kind of order, or is a replay's,
                which is empty.
        """
        refuse_replay(state)
        if SOURCES in state:
            raise DataError(
                "cannot resume the data: data.sources were "
                f"{', '.join(state[SOURCES])} when the checkpoint was written, and there are none "
                "now; restore them, or start another run"
            )
        of_source = "" if self._source is None else f" of data.sources.{self._source}"
        current = self.state_dict()
        for name, meaning in (
            ("count", "number of problems"),
            ("fingerprint", "content of the data set"),
            ("seed", "seed"),
            ("shuffle", "data.shuffle"),
        ):
            if state[name] != current[name]:
                raise DataError(
                    f"cannot resume the data{of_source}: its {meaning} was {state[name]!r} when "
                    f"the checkpoint was written and is {current[name]!r} now; restore it, or "
                    "start another run"
                )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken. Raises DataError: see check_state."""
        self.check_state(state)
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._rows)))
        return seeded_permutation(len(self._rows), self._seed, _PURPOSE, epoch, *self._keys)

    def _prompt(self, index: int) -> Prompt:
        row = self._rows[index]
        token_ids, of_critic = tuple(self._token_ids[index]), self._critic_token_ids[index]
        return Prompt(
            index + self._first_index, row.prompt, token_ids, row.answer, row.metadata, row.source,
            None if of_critic is None else tuple(of_critic),
        )  # fmt: skip


T = TypeVar("T", list[int], "array.array[int]")


def without_second_begin(token_ids: T, begin: T) -> T:
    """Return a prompt that begins once: texts of a chat template often have the begin token."""
    while begin and token_ids[:2] == begin + begin:
        token_ids = token_ids[1:]
    return token_ids


def refuse_replay(state: Mapping[str, Any]) -> None:
    """Raise DataError if a state_dict is a replay's, which is empty."""
    if not state:
        raise DataError(
            "cannot resume the data: the checkpoint was written by a replay, which has no "
            "position in them; go on with --replay, or start another run with logging.run_dir"
        )


def _key(source: str) -> int:
    return int.from_bytes(hashlib.blake2b(source.encode(), digest_size=8).digest(), "big")


def _fingerprint(problems: Sequence[Problem]) -> str:
    digest = hashlib.sha256()
    for problem in problems:
        texts = [problem.prompt, problem.answer]
        texts += [problem.critic_prompt] if problem.critic_prompt is not None else []
        parts = [text.encode("utf-8", "surrogatepass") for text in texts]
        if problem.response is not None:
            given = problem.response
            parts.append(given.encode() if isinstance(given, str) else given.tobytes())
        for data in parts:
            digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()

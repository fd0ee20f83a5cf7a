"""Problems as prompts, in a seeded order that depends on (seed, epoch) alone and can be resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vapo_megatron.data.batch import Prompt
from vapo_megatron.data.order import seeded_permutation
from vapo_megatron.data.problems import Problem, load_problems
from vapo_megatron.errors import DataError

if TYPE_CHECKING:
    from vapo_megatron.config import VapoConfig

__all__ = ["Problem", "PromptDataset", "load_problems", "read_prompts"]

_PURPOSE = 1
"""Keeps this order apart from other orders of the same seed."""


def read_prompts(
    path: str | Path,
    config: VapoConfig,
    tokenize: Callable[[str], Sequence[int]],
    *,
    shuffle: bool = False,
) -> PromptDataset:
    """Read a file of problems as prompts of a run.

    Raises:
        DataError: see load_problems and PromptDataset; names the file.
    """
    problems = load_problems(path, config.data.prompt_column, config.data.answer_column)
    limit = config.rollout.max_prompt_tokens
    try:
        return PromptDataset(
            problems, tokenize, seed=config.seed, shuffle=shuffle, max_prompt_tokens=limit
        )
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


class PromptDataset:
    """Hands out prompts epoch by epoch; every rank that asks alike is given the same.

    Args:
        problems: the data set, at least one.
        tokenize: text -> token ids, with whatever special tokens a prompt begins with.
        seed: of the order.
        shuffle: a new order in each epoch; otherwise the file's order.
        max_prompt_tokens: longer prompts are refused at once; None: no limit.

    Raises:
        DataError: no problems, or a prompt of no tokens or too many.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        tokenize: Callable[[str], Sequence[int]],
        *,
        seed: int,
        shuffle: bool = True,
        max_prompt_tokens: int | None = None,
    ) -> None:
        if not problems:
            raise DataError("the data set is empty; give a file with at least one problem")
        self._rows = list(problems)
        self._tokenize = tokenize
        self._seed = seed
        self._shuffle = shuffle
        self._max_prompt_tokens = max_prompt_tokens
        self._fingerprint = _fingerprint(self._rows)
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)
        if max_prompt_tokens is not None:
            for index in range(len(self._rows)):
                self._prompt(index)

    def __len__(self) -> int:
        """Number of problems."""
        return len(self._rows)

    @property
    def problems(self) -> list[Prompt]:
        """Every problem once, in the file's order."""
        return [self._prompt(index) for index in range(len(self._rows))]

    @property
    def answers(self) -> list[str]:
        """The ground truth of each problem."""
        return [row.answer for row in self._rows]

    def next(self, count: int) -> list[Prompt]:
        """Return the next prompts and move on; the end of an epoch leads into the next one."""
        picked: list[int] = []
        while len(picked) < count:
            if self._position == len(self._rows):
                self._epoch += 1
                self._position = 0
                self._order = self._order_of(self._epoch)
            end = min(self._position + count - len(picked), len(self._rows))
            picked += self._order[self._position : end]
            self._position = end
        return [self._prompt(index) for index in picked]

    def state_dict(self) -> dict[str, Any]:
        """Return where the next prompt stands: plain numbers and text."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "count": len(self._rows),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            DataError: the state belongs to another data set, seed or kind of order, or is a
                replay's, which is empty.
        """
        if not state:
            raise DataError(
                "cannot resume the data: the checkpoint was written by a replay, which has no "
                "place in it; go on with --replay, or start another run with logging.run_dir"
            )
        current = self.state_dict()
        for name, meaning in (
            ("count", "number of problems"),
            ("fingerprint", "content of the data set"),
            ("seed", "seed"),
            ("shuffle", "data.shuffle"),
        ):
            if state[name] != current[name]:
                raise DataError(
                    f"cannot resume the data: its {meaning} was {state[name]!r} when the "
                    f"checkpoint was written and is {current[name]!r} now; restore it, or start "
                    "another run"
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._rows)))
        return seeded_permutation(len(self._rows), self._seed, _PURPOSE, epoch)

    def _prompt(self, index: int) -> Prompt:
        row = self._rows[index]
        token_ids = tuple(self._tokenize(row.prompt))
        limit = self._max_prompt_tokens
        if not token_ids:
            raise DataError(f"problem {index} (from 0) has no tokens: {row.prompt!r}; remove it")
        if limit is not None and len(token_ids) > limit:
            raise DataError(
                f"problem {index} (from 0) has {len(token_ids)} tokens, more than "
                f"rollout.max_prompt_tokens={limit}: {row.prompt[:60]!r}...; raise the limit or "
                "remove the problem"
            )
        return Prompt(index=index, text=row.prompt, token_ids=token_ids, answer=row.answer)


def _fingerprint(problems: Sequence[Problem]) -> str:
    digest = hashlib.sha256()
    for problem in problems:
        for text in (problem.prompt, problem.answer):
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()

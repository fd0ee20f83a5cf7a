"""Prompts of several sources in the proportions of their weights, which may change with the step.

The sources are interleaved evenly, not drawn at random: each draw credits every source with its
share of one prompt, and the source with the most credit gives the next prompt of its own seeded
order and is charged one. So any stretch of a step has the weights' proportions, which gives all
engines the same mixture, and a source's prompts so far are the sum of its shares to about one
prompt (half a prompt with two sources), in every step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vapo_megatron.data.problems import Problem
from vapo_megatron.data.prompts import SOURCES, PromptDataset, refuse_replay
from vapo_megatron.data.rollout import Prompt
from vapo_megatron.errors import DataError


class Mixture:
    """Several PromptDatasets as one; the same calls return the same prompts on every rank.

    Args:
        parts: by source, in the order of their `first_index`; they share no index.
        weights_after: steps done -> a weight for each source, at least one above 0. A source of
            weight 0 gives no prompt.
    """

    def __init__(
        self,
        parts: Mapping[str, PromptDataset],
        weights_after: Callable[[int], Mapping[str, float]],
    ) -> None:
        self._parts = dict(parts)
        self._weights_after = weights_after
        self._credit = dict.fromkeys(self._parts, 0.0)
        """In prompts; the sum is 0."""

    @property
    def path(self) -> str:
        """All files, for messages."""
        return ", ".join(part.path for part in self._parts.values())

    @property
    def begun_twice(self) -> int:
        """See PromptDataset."""
        return sum(part.begun_twice for part in self._parts.values())

    @functools.cached_property
    def rows(self) -> Sequence[Problem]:
        """Every problem as it was read, source by source in the files' order."""
        return [row for part in self._parts.values() for row in part.rows]

    @property
    def problems(self) -> list[Prompt]:
        """Every problem once, without those left out, source by source in the files' order."""
        return [prompt for part in self._parts.values() for prompt in part.problems]

    @property
    def kept(self) -> list[tuple[int, Problem]]:
        """Those of `rows` that are not left out, with their indices."""
        return [(first + i, row) for first, part in self._placed() for i, row in part.kept]

    @property
    def left_out(self) -> dict[int, str]:
        """Index of `rows` -> why it is never drawn."""
        return {
            first + i: reason
            for first, part in self._placed()
            for i, reason in part.left_out.items()
        }

    def assign(self, verifiers: Mapping[int, str]) -> None:
        """Let these of `rows` name these verifiers."""
        for first, part in self._placed():
            part.assign(_within(verifiers, first, len(part)))
        vars(self).pop("rows", None)

    def leave_out(self, reasons: Mapping[int, str]) -> None:
        """Draw these of `rows` no more; see PromptDataset. DataError: nothing of a part is left."""
        for first, part in self._placed():
            part.leave_out(_within(reasons, first, len(part)))

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of one of `rows`, left out or not."""
        first, part = next(p for p in reversed(self._placed()) if p[0] <= index)
        return part.prompt(index)

    def _placed(self) -> list[tuple[int, PromptDataset]]:
        """Return the parts, each with the index of its first row."""
        ends = itertools.accumulate(map(len, self._parts.values()), initial=0)
        return list(zip(ends, self._parts.values()))

    def __len__(self) -> int:
        """Number of problems in all sources."""
        return sum(map(len, self._parts.values()))

    def row(self, index: int) -> tuple[str, int]:
        """Return the file and the row (from 0) of one of `rows`."""
        for part in self._parts.values():
            if index < len(part):
                return part.row(index)
            index -= len(part)
        raise IndexError(index)

    def next(self, count: int, step: int) -> list[Prompt]:
        """Return the next prompts in the proportions of a step, from 0; it may draw repeatedly."""
        weights = self._weights_after(step)
        total = sum(weights.values())
        drawn = {name: weight for name, weight in weights.items() if weight > 0}
        prompts = []
        for _ in range(count):
            for name, weight in drawn.items():
                self._credit[name] += weight / total
            chosen = max(drawn, key=self._credit.__getitem__)
            self._credit[chosen] -= 1
            prompts += self._parts[chosen].next(1)
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """Return each source's position and credit as JSON values."""
        states = {name: part.state_dict() for name, part in self._parts.items()}
        return {SOURCES: states, "credit": dict(self._credit)}

    def check_state(self, state: dict[str, Any]) -> None:
        """Check that a state_dict belongs to these sources, and change nothing.

        The weights may be others than they were.

        Raises:
            DataError: it belongs to other sources or is a replay's; see PromptDataset.
        """
        refuse_replay(state)
        states, names = state.get(SOURCES, {}), ", ".join(self._parts)
        if set(states) != set(self._parts):
            raise DataError(
                f"cannot resume the data: data.sources were {', '.join(states) or 'none'} when the "
                f"checkpoint was written and are {names} now; restore them, or start another run"
            )
        for name, part in self._parts.items():
            part.check_state(states[name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken. Raises DataError: see check_state."""
        self.check_state(state)
        for name, part in self._parts.items():
            part.load_state_dict(state[SOURCES][name])
            self._credit[name] = state["credit"][name]


def _within(values: Mapping[int, str], first: int, count: int) -> dict[int, str]:
    """Return the values of indices from first on, counted from there."""
    return {i - first: value for i, value in values.items() if first <= i < first + count}


TrainingPrompts = PromptDataset | Mixture
"""What a run draws its prompts from, and what it evaluates on."""

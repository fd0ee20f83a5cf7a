"""Prompts of several sources in the proportions of their weights, which may change with the step.

The sources are interleaved evenly, not drawn at random: each draw credits every source with its
share of one prompt, and the source with the most credit gives the next prompt of its own seeded
order and is charged one. So any stretch of a step has the weights' proportions, which gives all
engines the same mixture, and a source's prompts so far are the sum of its shares to about one
prompt (half a prompt with two sources), in every step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from vapo_megatron.data.prompts import SOURCES, PromptDataset, refuse_replay
from vapo_megatron.data.rollout import Prompt
from vapo_megatron.errors import DataError


class Mixture(PromptDataset):
    """Several PromptDatasets as one; the same calls return the same prompts on every rank.

    Its rows are those of the parts, source by source; each part keeps its own order and position.

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
        in_order = self._parts.values()
        self._starts = dict(zip(self._parts, itertools.accumulate(map(len, in_order), initial=0)))
        """Index of each part's first row."""
        self.path = ", ".join(part.path for part in in_order)
        self.num_double_begin = sum(part.num_double_begin for part in in_order)
        self._first_index = 0
        self._rows = [row for part in in_order for row in part.rows]
        self._token_ids = [ids for part in in_order for ids in part._token_ids]
        self._critic_token_ids = [ids for part in in_order for ids in part._critic_token_ids]
        self._responses = [ids for part in in_order for ids in part._responses]
        self.left_out = {}
        self.leave_out({})

    def assign(self, verifiers: Mapping[int, str]) -> None:
        """Let these of `rows` name these verifiers."""
        super().assign(verifiers)
        for name, part in self._parts.items():
            part.assign(self._within(name, verifiers))

    def leave_out(self, reasons: Mapping[int, str]) -> None:
        """Draw these of `rows` no more; see PromptDataset. DataError: nothing of a part is left."""
        for name, part in self._parts.items():
            part.leave_out(self._within(name, reasons))
            self.left_out |= {self._starts[name] + i: why for i, why in part.left_out.items()}

    def _within(self, name: str, values: Mapping[int, str]) -> dict[int, str]:
        """Return the values of a part's rows, by their index in the part."""
        start, part = self._starts[name], self._parts[name]
        return {i - start: value for i, value in values.items() if 0 <= i - start < len(part)}

    def row(self, index: int) -> tuple[str, int]:
        """Return the file and the row (from 0) of one of `rows`."""
        name = next(n for n in reversed(self._starts) if self._starts[n] <= index)
        return self._parts[name].row(index - self._starts[name])

    def next(self, count: int, step: int = 0) -> list[Prompt]:
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

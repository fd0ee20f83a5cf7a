"""Predicted seconds of generation with rollout.carry_over_groups, once a run is under way.

Some replicas are followed through many steps, as rollout/carried.py has it: a step begins groups
until its own and the extra ones are in flight, ends once as many as it trains on are whole (and
those that must be), and recomputes keys and values of what goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vapo_megatron.data.order import seeded_permutation
from vapo_megatron.planning.decode import Rank, decode

MOST_REPLICAS = 8
"""That are followed: the slowest of these stands for the slowest of all."""
WARM_UP, MEASURED = 4, 4
"""Steps: the first ones begin with nothing in flight, and are left out."""
_PURPOSE = 8
"""Makes this order differ from other orders of the same seed."""


class Sizes(NamedTuple):
    """Of one replica's share."""

    groups: int
    """That a step trains on."""
    extra: int
    group_size: int
    max_lag: int
    prompt_tokens: int
    batch: int


@dataclasses.dataclass
class _Group:
    begun: int
    """Step."""
    lengths: NDArray[np.int64]
    sampled: NDArray[np.int64]

    @property
    def is_whole(self) -> bool:
        return bool((self.sampled == self.lengths).all())


class Step(NamedTuple):
    """One replica's step."""

    seconds: float
    """Without prefill."""
    prefill_seconds: float
    tail: float


def carried_steps(
    rank: Rank,
    prefill_seconds: Callable[[Sequence[int]], float],
    lengths: NDArray[np.int64],
    num_replicas: int,
    sizes: Sizes,
) -> list[Step]:
    """Return the slowest replica's numbers of each measured step.

    Args:
        rank: cost of decoding.
        prefill_seconds: of sequences of these lengths.
        lengths: of a step's responses; their order is another one in each step and replica.
        num_replicas: that sample.
        sizes: of one replica's share, the largest.
    """
    of_replicas = [
        list(_replica(rank, prefill_seconds, lengths, seed, sizes))[WARM_UP:]
        for seed in range(min(num_replicas, MOST_REPLICAS))
    ]
    return [max(steps) for steps in zip(*of_replicas, strict=True)]


def _replica(
    rank: Rank,
    prefill_seconds: Callable[[Sequence[int]], float],
    lengths: NDArray[np.int64],
    seed: int,
    sizes: Sizes,
) -> Iterator[Step]:
    flight: list[_Group] = []
    for step in range(WARM_UP + MEASURED):
        order = lengths[seeded_permutation(len(lengths), WARM_UP * step + seed * 997, _PURPOSE)]
        missing = sizes.groups + sizes.extra - len(flight)
        for i in range(missing):
            own = np.resize(order[i * sizes.group_size :], sizes.group_size)
            flight.append(_Group(step, own, np.zeros_like(own)))
        prefill = prefill_seconds(list(_prefilled(flight, step, sizes.prompt_tokens)))
        asked = [
            (group, i)
            for group in flight
            for i in range(sizes.group_size)
            if group.sampled[i] < group.lengths[i]
        ]
        requests = [
            (sizes.prompt_tokens + int(g.sampled[i]), int(g.lengths[i] - g.sampled[i]))
            for g, i in asked
        ]
        is_enough = _Enough(flight, [group for group, _ in asked], step, sizes)
        found = decode(rank, requests, sizes.batch, is_enough)
        for (group, i), count in zip(asked, found.sampled, strict=True):
            group.sampled[i] += count
        taken = [group for group in flight if group.is_whole][: sizes.groups]
        flight = [group for group in flight if not any(group is one for one in taken)]
        yield Step(found.seconds, prefill, found.tail)


class _Enough:
    """Whether a step may end, asked as each response of `asked` becomes whole."""

    def __init__(
        self, flight: Sequence[_Group], asked: Sequence[_Group], step: int, sizes: Sizes
    ) -> None:
        self._asked = asked
        self._left = {id(group): int((group.sampled < group.lengths).sum()) for group in flight}
        self._missing = sizes.groups - sum(count == 0 for count in self._left.values())
        due = (group for group in flight if group.begun + sizes.max_lag <= step)
        self._due = {id(group) for group in due if self._left[id(group)]}

    def __call__(self, index: int) -> bool:
        key = id(self._asked[index])
        self._left[key] -= 1
        if self._left[key] == 0:
            self._missing -= 1
            self._due.discard(key)
        return self._missing <= 0 and not self._due


def _prefilled(flight: Sequence[_Group], step: int, prompt_tokens: int) -> Iterator[int]:
    """Yield the lengths that are computed: a new group's prompt once, others with what there is."""
    for group in flight:
        if group.begun == step:
            yield prompt_tokens
        else:
            begun = group.sampled[(group.sampled < group.lengths) & (group.sampled > 0)]
            yield from (prompt_tokens + int(count) for count in begun)

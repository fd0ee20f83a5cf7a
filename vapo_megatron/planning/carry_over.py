"""Predicted seconds of generation with rollout.carry_over_groups, once a run is under way.

Some replicas are followed through many steps, as rollout/carried.py has it: a step begins groups
until its own and the extra ones are in flight, ends once as many as it trains on are whole (and
those that must be), and recomputes keys and values of what goes on, unless they are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vapo_megatron.data.order import seeded_permutation
from vapo_megatron.planning.decode import Decoded, Rank, decode

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


@dataclasses.dataclass(eq=False)
class _Group:
    begun: int
    """Step."""
    lengths: NDArray[np.int64]
    sampled: NDArray[np.int64]

    @property
    def missing(self) -> int:
        """Responses that are not whole."""
        return int((self.sampled < self.lengths).sum())


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
    return [
        max(steps, key=lambda step: step.seconds + step.prefill_seconds)
        for steps in zip(*of_replicas, strict=True)
    ]


def _replica(
    rank: Rank,
    prefill_seconds: Callable[[Sequence[int]], float],
    lengths: NDArray[np.int64],
    seed: int,
    sizes: Sizes,
) -> Iterator[Step]:
    flight: list[_Group] = []
    num_steps = WARM_UP + MEASURED
    for step in range(num_steps):
        order = lengths[seeded_permutation(len(lengths), num_steps * seed + step, _PURPOSE)]
        missing = sizes.groups + sizes.extra - len(flight)
        for i in range(missing):
            own = np.resize(order[i * sizes.group_size :], sizes.group_size)
            flight.append(_Group(step, own, np.zeros_like(own)))
        is_enough = _Enough(flight, step, sizes)
        if is_enough.reached:
            flight = _left(flight, sizes)
            yield Step(0.0, 0.0, 0.0)
            continue
        prefill = prefill_seconds(list(_prefilled(flight, sizes)))
        found = _sample(rank, flight, sizes, is_enough)
        flight = _left(flight, sizes)
        yield Step(found.seconds, prefill, found.tail)


def _sample(rank: Rank, flight: Sequence[_Group], sizes: Sizes, is_enough: _Enough) -> Decoded:
    """Sample at what is not whole, in its order, until it is enough."""
    asked = [
        (group, i)
        for group in flight
        for i in range(sizes.group_size)
        if group.sampled[i] < group.lengths[i]
    ]
    requests = [
        (sizes.prompt_tokens + int(group.sampled[i]), int(group.lengths[i] - group.sampled[i]))
        for group, i in asked
    ]
    found = decode(rank, requests, sizes.batch, lambda index: is_enough.after(asked[index][0]))
    for (group, i), count in zip(asked, found.sampled, strict=True):
        group.sampled[i] += count
    return found


def _left(flight: Sequence[_Group], sizes: Sizes) -> list[_Group]:
    """Return what stays in flight: a step trains on the whole groups that were begun first."""
    taken = [group for group in flight if group.missing == 0][: sizes.groups]
    return [group for group in flight if group not in taken]


class _Enough:
    """Whether a step may end."""

    def __init__(self, flight: Sequence[_Group], step: int, sizes: Sizes) -> None:
        self._missing = {group: group.missing for group in flight}
        self._num_groups = sizes.groups - list(self._missing.values()).count(0)
        self._due = {g for g, n in self._missing.items() if n and g.begun + sizes.max_lag <= step}

    @property
    def reached(self) -> bool:
        """As many groups are whole as the step trains on, and those that must be."""
        return self._num_groups <= 0 and not self._due

    def after(self, group: _Group) -> bool:
        """Count one more of a group's responses as whole; return whether that is enough."""
        self._missing[group] -= 1
        if self._missing[group] == 0:
            self._num_groups -= 1
            self._due.discard(group)
        return self.reached


def _prefilled(flight: Sequence[_Group], sizes: Sizes) -> Iterator[int]:
    """Yield the lengths that are computed: begun responses, and once the prompt of the others."""
    for group in flight:
        unbegun = int((group.sampled == 0).sum())
        begun = group.sampled[(group.sampled < group.lengths) & (group.sampled > 0)]
        yield from (sizes.prompt_tokens + int(count) for count in begun)
        if unbegun:
            yield sizes.prompt_tokens

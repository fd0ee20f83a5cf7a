"""Predicted seconds of generation with rollout.carry_over_groups, once a run is under way.

Simulates a few replicas over many steps with the rules of rollout/partial: a step starts groups
until its own and the extra ones are in flight, ends once its own number (and those at max_lag) are
finished, and recomputes keys and values of resumed responses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vapo_megatron.data.order import seeded_permutation
from vapo_megatron.planning.decode import Decoded, Rank, decode
from vapo_megatron.rollout.partial.tally import Tally

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
    started: int
    """Step."""
    lengths: NDArray[np.int64]
    sampled: NDArray[np.int64]

    @property
    def missing(self) -> int:
        """Responses that are unfinished."""
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
        for i in range(sizes.groups + sizes.extra - len(flight)):
            own = np.resize(order[i * sizes.group_size :], sizes.group_size)
            flight.append(_Group(step, own, np.zeros_like(own)))
        tally = Tally(
            [group.started for group in flight], [group.missing for group in flight],
            step=step, share=sizes.groups, max_lag=sizes.max_lag,
        )  # fmt: skip
        found = Step(0.0, 0.0, 0.0)
        if not tally.is_enough():
            prefill = prefill_seconds(list(_prefilled(flight, sizes)))
            decoded = _sample(rank, flight, sizes, tally)
            found = Step(decoded.seconds, prefill, decoded.tail)
        selected = tally.selected()
        flight = [group for i, group in enumerate(flight) if i not in selected]
        yield found


def _sample(rank: Rank, flight: Sequence[_Group], sizes: Sizes, tally: Tally) -> Decoded:
    """Sample what is unfinished, in its order, until it is enough."""
    asked = [
        (number, i)
        for number, group in enumerate(flight)
        for i in range(sizes.group_size)
        if group.sampled[i] < group.lengths[i]
    ]
    requests = [
        (sizes.prompt_tokens + int(group.sampled[i]), int(group.lengths[i] - group.sampled[i]))
        for group, i in ((flight[number], i) for number, i in asked)
    ]

    def is_enough(index: int) -> bool:
        tally.finished(asked[index][0])
        return tally.is_enough()

    found = decode(rank, requests, sizes.batch, is_enough)
    for (number, i), count in zip(asked, found.sampled, strict=True):
        flight[number].sampled[i] += count
    return found


def _prefilled(flight: Sequence[_Group], sizes: Sizes) -> Iterator[int]:
    """Yield the lengths that are computed: started responses, and once the prompt of the others."""
    for group in flight:
        started = group.sampled[(group.sampled < group.lengths) & (group.sampled > 0)]
        yield from (sizes.prompt_tokens + int(count) for count in started)
        if (group.sampled == 0).any():
            yield sizes.prompt_tokens

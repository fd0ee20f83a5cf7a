"""Plans a step: mini-batches, their split over data-parallel ranks, and their microbatches.

Pure functions of the lengths: every rank computes the same plan.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vapo_megatron.data.order import seeded_permutation

if TYPE_CHECKING:
    from vapo_megatron.config import AlgorithmConfig, ParallelConfig

_PURPOSE = 2
"""Separates this order from other orders of the same seed."""


def attention_tokens(hidden_size: int) -> int:
    """Return the length at which attention costs as much as the matrix products: 12 H.

    A layer of about 12 H^2 parameters takes 24 H^2 FLOPs per token, and causal attention 2 l H per
    token of a sequence of length l.
    """
    return 12 * hidden_size


Microbatches = list[list[int]]
"""What a data-parallel rank computes for an update: by forward pass, the positions of its responses
in the step, longest first."""


@dataclasses.dataclass(frozen=True)
class MiniBatchPlan:
    """One optimizer update."""

    ranks: list[Microbatches]
    """By data-parallel rank. All have the same number of microbatches; a rank with fewer responses
    has empty ones."""

    @property
    def num_microbatches(self) -> int:
        """Forward passes of each rank."""
        return len(self.ranks[0])


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A step's optimizer updates: who computes what, in which forward passes."""

    mini_batches: list[MiniBatchPlan]

    def positions(self, dp_rank: int) -> list[int]:
        """Return the responses of a rank in the order of its batch: that of its forward passes."""
        return [p for plan in self.mini_batches for part in plan.ranks[dp_rank] for p in part]

    def microbatch_sizes(self, dp_rank: int) -> list[list[int]]:
        """Return how many responses each microbatch of each mini-batch takes of a rank's batch."""
        return [list(map(len, plan.ranks[dp_rank])) for plan in self.mini_batches]


def cost(length: int, attention_tokens: int) -> float:
    """Return the cost of a sequence, in a token's matrix products: l + l^2 / attention_tokens."""
    return length + length * length / attention_tokens


def plan_of(
    sequence_lengths: Sequence[int],
    algorithm: AlgorithmConfig,
    parallel: ParallelConfig,
    *,
    hidden_size: int,
    seed: int,
    step: int,
) -> StepPlan:
    """Plan a run's step: the same on the ranks that train on it and on those that sampled it.

    Args:
        sequence_lengths: prompt + response of every response, by position.
        algorithm, parallel: mini-batches; layout and token budget.
        hidden_size: the model's.
        seed: the run's.
        step: from 0.
    """
    return plan_step(
        sequence_lengths,
        mini_batch_size=algorithm.mini_batch_size,
        dp_size=parallel.data_parallel_size,
        max_tokens_per_microbatch=parallel.max_tokens_per_microbatch,
        seed=seed * 1_000_003 + step,
        attention_tokens=attention_tokens(hidden_size),
    )


def plan_step(
    sequence_lengths: Sequence[int],
    *,
    mini_batch_size: int,
    dp_size: int,
    max_tokens_per_microbatch: int,
    seed: int,
    attention_tokens: int,
) -> StepPlan:
    """Plan a step's optimizer updates. Every response is in exactly one microbatch.

    Which responses form a mini-batch depends only on the seed and their number, not on dp_size or
    on lengths: the update is the same in every layout.

    Args:
        sequence_lengths: prompt + response tokens of every response of the step, over all ranks.
        mini_batch_size: responses per update, over all ranks; the last one may have fewer.
        dp_size: data-parallel ranks.
        max_tokens_per_microbatch: of a forward pass; a longer response gets one of its own.
        seed: differs from step to step.
        attention_tokens: see `cost`.
    """
    lengths = [int(length) for length in sequence_lengths]
    assert all(length > 0 for length in lengths), "a sequence has at least its prompt"
    assert mini_batch_size > 0 and dp_size > 0, f"{mini_batch_size=} {dp_size=}"
    costs = [cost(length, attention_tokens) for length in lengths]
    order = seeded_permutation(len(lengths), seed, _PURPOSE)
    plans = []
    for start in range(0, len(order), mini_batch_size):
        members = order[start : start + mini_batch_size]
        ranks = balanced_partition({p: costs[p] for p in members}, dp_size)
        plans.append(MiniBatchPlan(_microbatches(ranks, lengths, costs, max_tokens_per_microbatch)))
    return StepPlan(plans)


def balanced_partition(costs: dict[int, float], parts: int) -> list[list[int]]:
    """Split items into parts of nearly equal cost: the costliest first, each to the cheapest part.

    Longest processing time first (Graham 1969): the costliest part is at most 4/3 of the optimum,
    and with hundreds of responses within 0.1% of the mean. No part is empty if there are enough
    items.

    Args:
        costs: item -> cost > 0.
        parts: number of parts.
    """
    split: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0.0, part) for part in range(parts)]
    for item in sorted(costs, key=lambda item: (-costs[item], item)):
        load, part = loads[0]
        split[part].append(item)
        heapq.heapreplace(loads, (load + costs[item], part))
    return split


def _microbatches(
    ranks: list[list[int]], lengths: list[int], costs: list[float], budget: int
) -> list[Microbatches]:
    """Return each rank's microbatches within the budget, the same number on every rank."""
    first_fit = [_first_fit(rank, lengths, budget) for rank in ranks]
    count = max(len(bins) for bins in first_fit)
    return [
        _in_equal_parts(rank, bins, count, lengths, costs, budget)
        for rank, bins in zip(ranks, first_fit)
    ]


def _in_equal_parts(
    rank: list[int],
    first_fit: list[list[int]],
    count: int,
    lengths: list[int],
    costs: list[float],
    budget: int,
) -> list[list[int]]:
    """Return microbatches of similar cost if the budget allows it, else first-fit's, split."""
    bins = balanced_partition({p: costs[p] for p in rank}, count)
    if not all(_fits(b, lengths, budget) for b in bins):
        bins = list(first_fit)
        while len(bins) < count:
            bins.sort(key=lambda b: (len(b) < 2, -sum(costs[p] for p in b), b))
            bins[:1] = balanced_partition({p: costs[p] for p in bins[0]}, 2)
    bins = [sorted(b, key=lambda p: (-lengths[p], p)) for b in bins]
    return sorted(bins, key=lambda b: (-sum(costs[p] for p in b), b))


def _fits(microbatch: list[int], lengths: list[int], budget: int) -> bool:
    return len(microbatch) < 2 or sum(lengths[p] for p in microbatch) <= budget


def _first_fit(rank: list[int], lengths: list[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: at most 11/9 of the minimum number of microbatches, plus one."""
    bins: list[list[int]] = []
    room: list[int] = []
    for position in sorted(rank, key=lambda p: (-lengths[p], p)):
        length = lengths[position]
        fitting = next((i for i, free in enumerate(room) if free >= length), None)
        if fitting is None:
            bins.append([])
            room.append(budget)
            fitting = len(bins) - 1
        bins[fitting].append(position)
        room[fitting] -= length
    return bins

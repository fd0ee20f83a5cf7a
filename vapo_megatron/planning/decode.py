"""Seconds of one replica's decoding: continuous batching, simulated event by event.

A decode step of n sequences on one rank of a replica of t ranks takes

    max(weights / bandwidth, n * 2 * parameters / t / FLOP/s) + KV cache of all n / bandwidth
    + two all-reduces of n H elements in each layer + the host's time per step

so between two events (a sequence ends, the next starts) the time is quadratic in the number of
steps.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Rank:
    """Cost of a decode step on one rank of a replica."""

    weight_seconds: float
    """Reading the weights, once for the whole batch."""
    token_seconds: float
    """Matrix multiplications, per sequence."""
    cached_seconds: float
    """Reading keys and values, per cached token."""
    sequence_seconds: float
    """Tensor-parallel communication, per sequence."""
    step_seconds: float
    """Host and latencies."""

    def seconds(self, sequences: int, steps: int, cached: int) -> float:
        """Time of `steps` steps that start with `cached` tokens in the cache."""
        each = max(self.weight_seconds, sequences * self.token_seconds)
        each += sequences * self.sequence_seconds + self.step_seconds
        reads = steps * cached + sequences * steps * (steps + 1) / 2
        return steps * each + reads * self.cached_seconds


class Decoded(NamedTuple):
    """What came of some requests."""

    seconds: float
    tail: float
    """Seconds with the batch less than half full."""
    sampled: list[int]
    """Tokens of each request."""


def decode(
    rank: Rank,
    requests: Sequence[tuple[int, int]],
    batch: int,
    is_enough: Callable[[int], bool] = lambda index: False,
) -> Decoded:
    """Decode requests, which start in their order.

    Args:
        rank: cost.
        requests: (tokens that there are, tokens to come) of each.
        batch: most that run at once.
        is_enough: called with the index of each request that is whole; True ends it all.
    """
    starts: dict[int, int] = {}
    running: list[tuple[int, int]] = []
    """(when it ends, index)"""
    now = cached = following = 0
    seconds = tail = 0.0
    enough = False
    while not enough and (following < len(requests) or running):
        while following < len(requests) and len(running) < batch:
            there, to_come = requests[following]
            starts[following] = now
            heapq.heappush(running, (now + to_come, following))
            cached += there
            following += 1
        steps = running[0][0] - now
        spent = rank.seconds(len(running), steps, cached)
        seconds += spent
        tail += spent if 2 * len(running) < batch else 0.0
        now += steps
        cached += steps * len(running)
        while running and running[0][0] == now:
            index = heapq.heappop(running)[1]
            cached -= sum(requests[index])
            enough |= is_enough(index)
    sampled = [min(to_come, now - starts.get(i, now)) for i, (_, to_come) in enumerate(requests)]
    return Decoded(seconds, tail, sampled)

"""Which of the ranks with the same parameters updates each; imports no torch, for planning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from vapo_megatron.algorithm.update_size import rank_of


class Item(NamedTuple):
    """A parameter of a rank, or a piece of one."""

    shapes: tuple[tuple[int, int], ...]
    """(out, in) of the whole matrices in it; none: AdamW updates it."""
    elements: int
    """Of this rank's shard."""


def num_pieces(rows: int, num_replicas: int) -> int:
    """Return into how many pieces a vocabulary's rows are cut: as many owners as divide them."""
    return math.gcd(rows, num_replicas)


def owners(items: Sequence[Item], method: str, fraction: float, num_replicas: int) -> list[int]:
    """Return the owner of each parameter: matrices by the work of an update, the rest by state.

    Args:
        items: all of a rank's; ties depend on their order.
        method: of matrices, "dion" or "muon".
        fraction: Dion's rank.
        num_replicas: ranks with the same parameters.
    """
    costs = []
    for item in items:
        ranks = [rank_of(s, fraction) if method == "dion" else min(s) for s in item.shapes]
        costs.append(sum((m + n) * r for (m, n), r in zip(item.shapes, ranks, strict=True)))
    found = share_out(costs, [0.0] * num_replicas)
    # What is no matrix costs no time, but memory.
    loads = [0.0] * num_replicas
    for item, owner in zip(items, found, strict=True):
        loads[owner] += item.elements if item.shapes else 0
    others = [index for index, item in enumerate(items) if not item.shapes]
    sizes = [items[index].elements for index in others]
    for index, owner in zip(others, share_out(sizes, loads), strict=True):
        found[index] = owner
    return found


def share_out(costs: Sequence[float], loads: list[float]) -> list[int]:
    """Give each item to the owner with the least load so far, the costliest first.

    Args:
        costs: of the items.
        loads: of the owners before; changed.

    Returns:
        The owner of each item; ties go to the first.
    """
    found = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = loads.index(min(loads))
        found[item] = owner
        loads[owner] += costs[item]
    return found

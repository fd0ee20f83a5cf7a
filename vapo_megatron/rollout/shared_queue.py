"""Positions of a step that replicas take from one list as they become free.

A replica begins with as many as it samples at once, always the same ones. The others wait in a list
and go, group by group, to whoever has room first, so that a replica that is slower, or has longer
responses, takes fewer of them. A response's random numbers do not depend on who samples it.

Imports neither torch nor vllm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vapo_megatron.rollout.requests import assign


def divide(
    num_requests: int, num_replicas: int, unit: int, at_once: int
) -> tuple[list[range], list[range]]:
    """Return the positions that each replica begins with, and the units that are left.

    Args:
        num_requests: of the step, whole units.
        num_replicas: that sample.
        unit: requests that stay together.
        at_once: responses that one replica samples concurrently; it begins with a unit at least.
    """
    first, rest = [], []
    for share in assign(num_requests, num_replicas, unit):
        begun = share[: max(1, at_once // unit) * unit]
        first.append(begun)
        left = share[len(begun) :]
        rest += [left[i : i + unit] for i in range(0, len(left), unit)]
    return first, rest


class SharedQueue:
    """One rank's view of a step's list; all ranks of a replica call `take` alike."""

    def __init__(
        self, first: Sequence[int], rest: Sequence[range], add: Callable[[int], int]
    ) -> None:
        """Take nothing yet.

        Args:
            first, rest: from `divide`, of this replica and of all.
            add: adds to the number of units that all replicas have taken, and returns the sum: the
                same on all ranks of this replica, added once.
        """
        self._first, self._rest, self._add = list(first), rest, add
        self._is_empty = not rest

    def take(self, room: int) -> list[int]:
        """Return positions to begin now: the first ones, then whole units that there is room for.

        It adds only if there is room for a unit and some may be left.
        """
        if self._first:
            found, self._first = self._first, []
            return found
        wanted = 0 if self._is_empty else room // len(self._rest[0])
        if wanted == 0:
            return []
        stop = self._add(wanted)
        self._is_empty = stop >= len(self._rest)
        return [position for unit in self._rest[stop - wanted : stop] for position in unit]

"""Which groups a replica starts, waits for and hands over with partial rollouts.

A replica has more groups in flight than its share of a step. In every step it starts new ones,
samples until its share is finished, and interrupts the others at that token; they resume in the
next step. Decisions depend on counts of groups and tokens only, so runs are reproducible. Nothing
is discarded: a step waits for groups that are max_lag steps old.

Imports neither torch nor vllm.
"""

from __future__ import annotations

from collections.abc import Sequence

from vapo_megatron.rollout.requests import assign


def shares(num_groups: int, num_replicas: int) -> list[int]:
    """Return how many of a step's groups each replica has."""
    return [len(part) for part in assign(num_groups, num_replicas)]


def num_started(in_flight: int, share: int, extra: int, steps_left: int) -> int:
    """Return how many groups a replica starts in a step.

    Args:
        in_flight: groups that it has not handed over.
        share: groups that it hands over in each step.
        extra: groups that it has in flight beyond these.
        steps_left: this step and those after it; the last step leaves no group behind.
    """
    return max(0, min(share + extra, share * steps_left) - in_flight)


class Tally:
    """Counts the finished groups of one step of a replica."""

    def __init__(
        self,
        started: Sequence[int],
        missing: Sequence[int],
        *,
        step: int,
        share: int,
        max_lag: int,
    ) -> None:
        """Begin a step.

        Args:
            started: the step in which each group in flight was started, in that order.
            missing: how many responses of each are unfinished.
            step: this one.
            share: groups that are handed over.
            max_lag: steps after which a group must be.
        """
        assert list(started) == sorted(started), f"groups of steps {started} are not in order"
        self._missing, self._share = list(missing), share
        self._num_finished = self._missing.count(0)
        due = sum(at <= step - max_lag for at in started)
        assert due <= share <= len(started), f"{due} due, {share} of {len(started)} wanted"
        self._due = {group for group in range(due) if missing[group]}

    def finished(self, group: int) -> None:
        """Note that a response of a group is finished."""
        self._missing[group] -= 1
        if self._missing[group] == 0:
            self._num_finished += 1
            self._due.discard(group)

    def is_enough(self) -> bool:
        """Whether a share is finished, and every group that is due."""
        return self._num_finished >= self._share and not self._due

    def selected(self) -> list[int]:
        """Return the groups to hand over: of those that are finished, the ones started first."""
        assert self.is_enough(), f"{self._num_finished} are finished, {self._due} are due"
        finished = (group for group, missing in enumerate(self._missing) if missing == 0)
        return list(finished)[: self._share]

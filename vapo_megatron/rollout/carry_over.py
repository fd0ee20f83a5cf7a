"""Which groups a replica begins, waits for and hands over when groups go on over several steps.

A replica has more groups in flight than its share of a step. In every step it begins new ones,
samples until its share is whole, and cuts the others at that token; they go on in the next step.
What is counted is groups and tokens, so a run repeats itself. Nothing is discarded: a group that
has waited max_lag steps is waited for.

Imports neither torch nor vllm.
"""

from __future__ import annotations

from collections.abc import Sequence

from vapo_megatron.rollout.requests import assign


def shares(num_groups: int, num_replicas: int) -> list[int]:
    """Return how many of a step's groups each replica has."""
    return [len(part) for part in assign(num_groups, num_replicas)]


def num_begun(in_flight: int, share: int, extra: int, steps_left: int) -> int:
    """Return how many groups a replica begins in a step.

    Args:
        in_flight: groups that it has not handed over.
        share: groups that it hands over in each step.
        extra: groups that it has in flight beyond these.
        steps_left: this step and those after it; the last step leaves no group behind.
    """
    return max(0, min(share + extra, share * steps_left) - in_flight)


class Tally:
    """Counts the whole groups of one step of a replica."""

    def __init__(
        self,
        begun: Sequence[int],
        missing: Sequence[int],
        *,
        step: int,
        share: int,
        max_lag: int,
    ) -> None:
        """Begin a step.

        Args:
            begun: the step in which each group in flight was begun, in that order.
            missing: how many responses of each are not whole.
            step: this one.
            share: groups that are handed over.
            max_lag: steps after which a group must be.
        """
        assert list(begun) == sorted(begun), f"groups begun in steps {begun} are not in order"
        self._missing, self._share = list(missing), share
        self._due = sum(at <= step - max_lag for at in begun)
        assert self._due <= share <= len(begun), f"{self._due} due, {share} of {len(begun)} wanted"

    def finished(self, group: int) -> None:
        """Note that a response of a group is whole."""
        self._missing[group] -= 1

    def is_enough(self) -> bool:
        """Whether a share is whole, and every group that is due."""
        whole = self._whole()
        return len(whole) >= self._share and whole[: self._due] == list(range(self._due))

    def taken(self) -> list[int]:
        """Return the groups to hand over: of those that are whole, the ones begun first."""
        assert self.is_enough(), f"{self._whole()} are whole"
        return self._whole()[: self._share]

    def _whole(self) -> list[int]:
        return [group for group, missing in enumerate(self._missing) if missing == 0]

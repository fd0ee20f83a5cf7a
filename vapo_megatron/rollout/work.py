"""Work for an engine: complete groups, divided among the replicas.

Partial rollouts are in partial/. Imports neither torch nor vllm.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from vapo_megatron.data.rollout import Prompt, Rollout
from vapo_megatron.rollout.requests import (
    Request,
    SamplingSettings,
    Work,
    assign,
    start_groups,
)

if TYPE_CHECKING:
    from vapo_megatron.rollout.episodes import Episodes
    from vapo_megatron.rollout.vllm.engine import RolloutEngine

T = TypeVar("T")


def generate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sizes: Sequence[int],
    step: int,
    sampling: SamplingSettings,
    policy_version: int,
    on_progress: Callable[[int, int], None] | None = None,
    has_time: Callable[[], bool] | None = None,
    on_finished: Callable[[Rollout], None] | None = None,
    episodes: Episodes | None = None,
) -> list[Rollout]:
    """Sample this replica's share of a step's groups, or of what replicas share of one.

    Args:
        engine: of this rank.
        prompts: of the whole step, the same on every rank of the world, one for each response.
        sizes: responses of each group.
        step: see request_seed.
        sampling: temperature, limits, the number of the sampling round, and who samples what.
        policy_version, on_progress, has_time: see RolloutEngine.run.
        on_finished: called with each rollout that will be returned, as soon as it is complete.
        episodes: of this rank; None: a response is one turn.

    Returns:
        On the replica's first rank its rollouts ordered by position, without those that vLLM
        aborted; none on its other ranks.

    Raises:
        RuntimeError, Stopped: see RolloutEngine.run.
    """
    groups = start_groups(
        prompts, sizes, seed=engine.seed, step=step, role=sampling.seed_role,
        round=sampling.round, policy_version=policy_version,
    )  # fmt: skip
    if not (sampling.whole_groups or sampling.shared):
        # Nothing needs a group on one replica, so balance by responses.
        groups = [[request] for group in groups for request in group]
    at_once = engine.at_once if sampling.shared else len(prompts)
    assert max(sizes) <= at_once, f"no replica has room for a group of {max(sizes)}"
    first, rest = divide(groups, engine.num_replicas, at_once)
    key = f"queue/{step}/{sampling.round}"
    queue = SharedQueue(first[engine.replica], rest, lambda wanted: engine.count(key, wanted))
    rollouts: dict[int, Rollout] = {}

    def ended(rollout: Rollout) -> None:
        if engine.keeps_rollouts:
            rollouts[rollout.position] = rollout
            if on_finished is not None:
                on_finished(rollout)

    work = Work(queue.take, ended, len(prompts) // engine.num_replicas)
    answered: contextlib.AbstractContextManager[Work] = contextlib.nullcontext(work)
    if episodes is not None:
        answered = episodes.answering(work, engine, sampling.max_response_tokens)
    with answered as asked:
        engine.run(asked, sampling, policy_version, on_progress, has_time)
    return [rollouts[p] for p in sorted(rollouts)]


def firsts(sizes: Sequence[int]) -> dict[int, int]:
    """Return the size of each group by the position of its first response."""
    starts = itertools.accumulate(sizes, initial=0)
    return dict(zip(starts, sizes))


def divide(
    groups: Sequence[Sequence[T]], num_replicas: int, at_once: int
) -> tuple[list[list[T]], list[Sequence[T]]]:
    """Return what each replica begins with, always the same, and the groups that are left.

    Args:
        groups: of the step; those of one group stay together.
        num_replicas: that sample.
        at_once: responses that one replica samples concurrently; it begins with a group at least.
    """
    first, rest = list[list[T]](), list[Sequence[T]]()
    for share in assign(len(groups), num_replicas):
        started, is_full = list[T](), False
        for group in groups[share.start : share.stop]:
            is_full = is_full or bool(started) and len(started) + len(group) > at_once
            if is_full:
                rest.append(group)
            else:
                started += group
        first.append(started)
    return first, rest


class SharedQueue:
    """One rank's view of a step's groups; all ranks of a replica call `take` alike.

    Groups that no replica begins with wait in one list and go to whoever has room first, so that a
    replica that is slower, or has longer responses, takes fewer of them.
    """

    def __init__(
        self, first: Sequence[Request], rest: Sequence[Sequence[Request]], add: Callable[[int], int]
    ) -> None:
        """Take nothing yet.

        Args:
            first, rest: from `divide`, of this replica and of all.
            add: adds to the number of groups that all replicas have taken, and returns the sum: the
                same on all ranks of this replica, added once.
        """
        self._first, self._rest, self._add = list(first), rest, add
        self._largest = max(map(len, rest), default=0)
        self._is_empty = not rest

    def take(self, room: int) -> list[Request]:
        """Return requests to begin now: the first ones, then whole groups that there is room for.

        It adds only if there is room for any group and some may be left.
        """
        if self._first:
            found, self._first = self._first, []
            return found
        wanted = 0 if self._is_empty else room // self._largest
        if wanted == 0:
            return []
        stop = self._add(wanted)
        self._is_empty = stop >= len(self._rest)
        return list(itertools.chain(*self._rest[stop - wanted : stop]))

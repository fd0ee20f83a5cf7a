"""Dynamic sampling: rounds until enough groups are mixed, neither all correct nor all wrong.

With reward.from_score a group is mixed if its rewards differ. Before and after each round, every
rank holds its own responses of the groups kept so far, and for all of these groups the number of
correct responses and whether the group is mixed. A round all-reduces two numbers per sampled group,
four with scores; responses stay on the rank that sampled them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from vapo_megatron.algorithm.dynamic_sampling import next_round_size, select_groups
from vapo_megatron.config import AlgorithmConfig, RewardConfig
from vapo_megatron.config.metrics import emits
from vapo_megatron.config.phases import REWARD
from vapo_megatron.data.rollout import ScoredRollout
from vapo_megatron.parallel.reduce import max_over_world, sum_over_world
from vapo_megatron.reward.shaping import base_reward
from vapo_megatron.reward.verifier import Status, Verdict
from vapo_megatron.rollout.source import Phase


class Round(NamedTuple):
    """A round's judged responses."""

    scored: list[ScoredRollout]
    """This rank's share, by position."""
    sizes: Sequence[int]
    """Responses of each of the round's groups, the same on every rank."""


@emits(
    "rollout/sampling_rounds",
    "rollout/groups_sampled",
    "rollout/groups_dropped_all_correct",
    "rollout/groups_dropped_all_wrong",
    "rollout/groups_dropped_surplus",
    "rollout/groups_filled",
    "rollout/sampled_correct_fraction",
)
def sample_mixed_groups(
    sample: Callable[[int, int], Round],
    phase: Phase,
    algorithm: AlgorithmConfig,
    reward: RewardConfig | None = None,
    *,
    has_environment: bool = False,
) -> tuple[list[ScoredRollout], dict[str, float]]:
    """Sample rounds of prompts and keep num_prompts groups, mixed ones first. Collective.

    Args:
        sample: called with a round (from 0) and a number of prompts; samples a group of responses
            to each of the next prompts.
        phase: times the wait for the other ranks' verdicts.
        algorithm: num_prompts (P, over all ranks), and dynamic_sampling_max_rounds, after which
            other groups fill up what is missing.
        reward: with from_score, rewards decide which groups are mixed; otherwise, and with None,
            verdicts do.
        has_environment: rewards decide, with those of the turns.

    Returns:
        (this rank's responses of the kept groups, ordered by position, which is renumbered from 0
        in the order of sampling; metrics, the same on every rank).

    Raises:
        RuntimeError: on every rank: the engine did not return every response of a group.
    """
    num_groups = algorithm.num_prompts
    held: list[ScoredRollout] = []
    # Of each group: its correct responses, whether it is mixed, and its size.
    of_held = of_all = torch.zeros(3, 0, dtype=torch.long)
    missing, rounds = num_groups, 0
    while missing and rounds < algorithm.dynamic_sampling_max_rounds:
        asked = next_round_size(missing, int(of_all[1].sum()), of_all.shape[1], num_groups)
        scored, sizes = sample(rounds, asked)
        of_size = torch.tensor(sizes)
        with phase(REWARD):
            correct = _correct_by_group(scored, of_size)
            mixed = (correct > 0) & (correct < of_size)
            if reward is not None and (reward.from_score is not None or has_environment):
                mixed = _rewards_differ(scored, of_size, reward)
        of_round = torch.stack([correct, mixed.long(), of_size])
        of_all = torch.cat([of_all, of_round], dim=1)
        # Groups kept so far compete again with this round's.
        candidates = torch.cat([of_held, of_round], dim=1)
        rows, missing = select_groups(
            candidates[0], candidates[2], num_groups, candidates[1].bool()
        )
        kept = candidates[:, rows]
        places = dict(zip(rows.tolist(), _starts(kept[2]).tolist()))
        held = [
            *_placed(held, of_held[2], 0, places),
            *_placed(scored, of_size, of_held.shape[1], places),
        ]
        of_held = kept
        rounds += 1
    return held, {"rollout/sampling_rounds": rounds, **_metrics(of_all, of_held)}


def _starts(sizes: Tensor) -> Tensor:
    """Return the position of each group's first response -> int64 [groups]."""
    return sizes.cumsum(0) - sizes


def _numbers(scored: Sequence[ScoredRollout], sizes: Tensor) -> Tensor:
    """Return the number of each response's group -> int64 [responses]."""
    first = torch.tensor([item.rollout.first for item in scored], dtype=torch.long)
    return torch.searchsorted(_starts(sizes), first)


def _correct_by_group(scored: Sequence[ScoredRollout], sizes: Tensor) -> Tensor:
    """Count each group's correct responses over all ranks -> int64 [groups]. Collective."""
    numbers = _numbers(scored, sizes)
    is_correct = torch.tensor([item.is_correct for item in scored], dtype=torch.bool)
    counts = [some.bincount(minlength=len(sizes)) for some in (numbers, numbers[is_correct])]
    given, correct = sum_over_world(torch.stack(counts))
    wrong = (given != sizes).nonzero().flatten().tolist()
    if wrong:
        asked, group = int(sizes.sum()), wrong[0]
        raise RuntimeError(
            f"the engine left out {asked - int(given.sum())} of {asked} responses: group {group} "
            f"(from 0) has {int(given[group])} of {int(sizes[group])}; restart the run: it resumes "
            "from its latest checkpoint"
        )
    return correct


def _rewards_differ(scored: Sequence[ScoredRollout], sizes: Tensor, reward: RewardConfig) -> Tensor:
    """Say in which groups rewards differ, over all ranks -> bool [groups]. Collective.

    Without the punishment of length, which would make every group mixed.
    """
    # Of the rewards and of their negatives.
    highest = torch.full((2, len(sizes)), -torch.inf, dtype=torch.float64)
    for item, number in zip(scored, _numbers(scored, sizes).tolist()):
        verifier = item.rollout.prompt.problem.verifier or reward.verifier
        verdict = Verdict(cast(Status, item.status), item.score)
        rollout = item.rollout
        base = base_reward(
            verdict, reward, verifier, truncated=rollout.truncated, is_paid=rollout.is_paid
        )
        total, of_group = base + item.earned, highest[:, number]
        torch.maximum(of_group, torch.tensor([total, -total]).to(of_group), out=of_group)
    highest = max_over_world(highest)
    return highest[0] > -highest[1]


def _placed(
    scored: Sequence[ScoredRollout], sizes: Tensor, before: int, places: Mapping[int, int]
) -> Iterator[ScoredRollout]:
    """Yield the responses of kept groups at their new positions.

    sizes: of the groups that they are of; before: number of the first of these in `places`.
    """
    for item, number in zip(scored, _numbers(scored, sizes).tolist()):
        if before + number in places:
            position = places[before + number] + item.rollout.sample
            moved = dataclasses.replace(item.rollout, position=position)
            yield dataclasses.replace(item, rollout=moved)


def _metrics(of_all: Tensor, of_held: Tensor) -> dict[str, float]:
    """Count groups: sampled = trained on + dropped_all_correct + dropped_all_wrong + surplus.

    of_all, of_held: int64 [3, groups], of each group sampled, and of each trained on: its correct
    responses, whether it is mixed, and its size.
    """

    def unmixed(groups: Tensor) -> Tensor:
        all_correct = groups[0] == groups[2]
        return ((groups[1] == 0) & torch.stack([all_correct, ~all_correct])).sum(1)

    all_correct, all_wrong = (unmixed(of_all) - unmixed(of_held)).tolist()
    num_sampled = of_all.shape[1]
    dropped = num_sampled - of_held.shape[1]
    return {
        "rollout/groups_sampled": num_sampled,
        "rollout/groups_dropped_all_correct": all_correct,
        "rollout/groups_dropped_all_wrong": all_wrong,
        "rollout/groups_dropped_surplus": dropped - all_correct - all_wrong,
        "rollout/groups_filled": int(unmixed(of_held).sum()),
        "rollout/sampled_correct_fraction": float(of_all[0].sum()) / int(of_all[2].sum()),
    }

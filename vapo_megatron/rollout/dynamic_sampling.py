"""Dynamic sampling: rounds until enough groups are mixed, neither all correct nor all wrong.

Where scores are the rewards, a group is mixed if its rewards differ. Before and after each round,
every rank holds the responses that it sampled itself of the groups kept so far, and of each of
those groups the number of correct responses and whether it is mixed. A round all-reduces two
numbers per sampled group, with scores four; responses stay on the rank that sampled them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

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
    sample: Callable[[int, int], Sequence[ScoredRollout]],
    phase: Phase,
    algorithm: AlgorithmConfig,
    reward: RewardConfig | None = None,
) -> tuple[list[ScoredRollout], dict[str, float]]:
    """Sample rounds of prompts and keep num_prompts groups, mixed ones first. Collective.

    Args:
        sample: called with a round (from 0) and a number of prompts; samples a group of responses
            to each of the next prompts and returns this rank's share by position, judged.
        phase: times the wait for the other ranks' verdicts.
        algorithm: num_prompts (P, over all ranks), group_size (G), and dynamic_sampling_max_rounds,
            after which other groups fill up what is missing.
        reward: with from_score, rewards decide which groups are mixed; otherwise, and with None,
            verdicts do.

    Returns:
        (this rank's responses of the kept groups, ordered by position, which is renumbered
        0 .. P*G-1 in the order of sampling; metrics, the same on every rank).

    Raises:
        RuntimeError: on every rank: the sampler did not return every response of a group.
    """
    num_groups, group_size = algorithm.num_prompts, algorithm.group_size
    held: list[ScoredRollout] = []
    # Of each group: its correct responses, and whether it is mixed.
    of_held = of_all = torch.zeros(2, 0, dtype=torch.long)
    missing, rounds = num_groups, 0
    while missing and rounds < algorithm.dynamic_sampling_max_rounds:
        asked = next_round_size(missing, int(of_all[1].sum()), of_all.shape[1], num_groups)
        scored = sample(rounds, asked)
        with phase(REWARD):
            correct = _correct_by_group(scored, asked, group_size)
            mixed = (correct > 0) & (correct < group_size)
            if reward is not None and reward.from_score is not None:
                mixed = _rewards_differ(scored, asked, group_size, reward)
        of_round = torch.stack([correct, mixed.long()])
        of_all = torch.cat([of_all, of_round], dim=1)
        candidates = torch.cat([of_held, of_round], dim=1)
        rows, missing = select_groups(candidates[0], group_size, num_groups, candidates[1].bool())
        places = {row: place for place, row in enumerate(rows.tolist())}
        held = [
            *_placed(held, 0, places, group_size),
            *_placed(scored, of_held.shape[1], places, group_size),
        ]
        of_held = candidates[:, rows]
        rounds += 1
    return held, {"rollout/sampling_rounds": rounds, **_metrics(of_all, of_held, group_size)}


def _correct_by_group(scored: Sequence[ScoredRollout], num_groups: int, group_size: int) -> Tensor:
    """Count each group's correct responses over all ranks -> int64 [num_groups]. Collective."""
    counts = []
    for part in (scored, [s for s in scored if s.is_correct]):
        groups = torch.tensor([s.rollout.position // group_size for s in part]).long()
        counts.append(groups.bincount(minlength=num_groups))
    given, correct = sum_over_world(torch.stack(counts))
    wrong = (given != group_size).nonzero().flatten().tolist()
    if wrong:
        asked, group = num_groups * group_size, wrong[0]
        raise RuntimeError(
            f"the sampler left out {asked - int(given.sum())} of {asked} responses: group {group} "
            f"(from 0) has {int(given[group])} of {group_size}; restart the run: it resumes from "
            "its latest checkpoint"
        )
    return correct


def _rewards_differ(
    scored: Sequence[ScoredRollout], num_groups: int, group_size: int, reward: RewardConfig
) -> Tensor:
    """Say in which groups rewards differ, over all ranks -> bool [num_groups]. Collective.

    Without the punishment of length, which would make every group mixed.
    """
    # Of the rewards and of their negatives.
    highest = torch.full((2, num_groups), -torch.inf, dtype=torch.float64)
    for item in scored:
        verifier = item.rollout.prompt.problem.verifier or reward.verifier
        verdict = Verdict(cast(Status, item.status), item.score)
        base = base_reward(verdict, reward, verifier, truncated=item.rollout.truncated)
        of_group = highest[:, item.rollout.position // group_size]
        torch.maximum(of_group, torch.tensor([base, -base]).to(of_group), out=of_group)
    highest = max_over_world(highest)
    return highest[0] > -highest[1]


def _placed(
    scored: Sequence[ScoredRollout], first: int, places: Mapping[int, int], group_size: int
) -> Iterator[ScoredRollout]:
    """Yield the responses of kept groups at their new positions; `first` numbers their group 0."""
    for item in scored:
        group, sample = divmod(item.rollout.position, group_size)
        if first + group in places:
            position = places[first + group] * group_size + sample
            moved = dataclasses.replace(item.rollout, position=position)
            yield dataclasses.replace(item, rollout=moved)


def _metrics(of_all: Tensor, of_held: Tensor, group_size: int) -> dict[str, float]:
    """Count groups: sampled = trained on + dropped_all_correct + dropped_all_wrong + surplus.

    of_all, of_held: int64 [2, groups], correct responses of each group sampled, and of each trained
    on, and whether it is mixed.
    """

    def unmixed(groups: Tensor) -> Tensor:
        all_correct = groups[0] == group_size
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
        "rollout/sampled_correct_fraction": float(of_all[0].sum()) / (num_sampled * group_size),
    }

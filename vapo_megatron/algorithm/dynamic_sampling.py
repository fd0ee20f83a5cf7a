"""Dynamic sampling: train on prompts of which some responses are better than others."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def select_groups(
    num_correct: Tensor, group_size: int | Tensor, num_groups: int, mixed: Tensor | None = None
) -> tuple[Tensor, int]:
    """Select the groups that a step trains on, and count how many mixed groups are missing.

        mixed: 0 < correct < G;   kept: the first num_groups mixed ones

    In a group whose responses are all correct or all wrong, every group-relative advantage is 0
    (apart from reward shaping such as the overlong punishment). Where scores are the rewards, that
    holds of a group whose rewards are all equal, so `mixed` is given. If mixed groups are missing,
    the first of the others take their place, so that the batch keeps its size. Surplus groups are
    dropped from the end: the selection depends only on verdicts and scores, not on which rank
    sampled a group or finished first.

    Source: DAPO (arXiv 2503.14476, section 3.2), dynamic sampling; filling up is our addition.

    Args:
        num_correct: int64 [P], responses of each group that the verifier found correct, in the
            order of sampling; the verdicts, not the shaped rewards.
        group_size: G, of all groups or int64 [P] of each.
        num_groups: groups that a step trains on, at least 1.
        mixed: bool [P], groups whose rewards differ; None: the verdicts decide.

    Returns:
        (int64 [min(P, num_groups)], indices of the selected groups, ascending; the number of
        missing mixed groups).

    Raises:
        ValueError: num_groups below 1, or counts outside 0 .. G.
    """
    if num_groups < 1:
        raise ValueError(f"num_groups={num_groups} must be at least 1")
    if ((num_correct < 0) | (num_correct > group_size)).any():
        raise ValueError(
            f"num_correct must lie in [0, {group_size}], the group size; found "
            f"{int(num_correct.min())} to {int(num_correct.max())}"
        )
    if mixed is None:
        mixed = (num_correct > 0) & (num_correct < group_size)
    kept = mixed.nonzero().squeeze(1)[:num_groups]
    missing = num_groups - kept.numel()
    others = (~mixed).nonzero().squeeze(1)[:missing]
    # In sampling order, so that which groups fill up does not change positions.
    return torch.cat([kept, others]).sort().values, missing


def next_round_size(missing: int, num_mixed: int, num_sampled: int, num_groups: int) -> int:
    """Number of prompts to sample in the next round.

        ceil((m + sqrt(m * (1 - p))) / p),   p = num_mixed / num_sampled,   at most num_groups

    m / p prompts yield m mixed groups on average; the square root adds one standard deviation,
    because one more round would take as long as its longest response.

    Source: DAPO (arXiv 2503.14476, section 3.2) samples until the batch is full; the round size is
    ours (mean and standard deviation of the negative binomial distribution).

    Args:
        missing: m, mixed groups still missing, at least 1.
        num_mixed, num_sampled: groups in this step so far.
        num_groups: groups that a step trains on.

    Returns:
        1 .. num_groups; num_groups while no group has been mixed.
    """
    if num_mixed == 0:
        return num_groups
    rate = num_mixed / num_sampled
    return min(num_groups, math.ceil((missing + math.sqrt(missing * (1 - rate))) / rate))

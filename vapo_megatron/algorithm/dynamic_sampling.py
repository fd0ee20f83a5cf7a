"""Dynamic sampling: train on the prompts whose responses are neither all right nor all wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def select_groups(num_correct: Tensor, group_size: int, num_groups: int) -> tuple[Tensor, int]:
    """Which groups a step trains on, and how many of them it lacks.

        mixed: 0 < correct < G;   kept: the first num_groups mixed ones

    In a group whose responses are all right or all wrong every group-relative advantage is 0, but
    for what shapes a reward (overlong punishment). Where mixed groups are missing, the first of the
    others fill their places, so that the step keeps its shape. Groups are cut from the end: the
    decision depends on the verdicts alone, and not on which rank sampled what or finished first.

    Source: DAPO (arXiv 2503.14476, section 3.2), dynamic sampling; filling up is ours.

    Args:
        num_correct: int64 [P], responses of each group that the verifier found correct, in the
            order of sampling; the verdicts, not the shaped rewards.
        group_size: G.
        num_groups: groups that a step trains on, at least 1.

    Returns:
        (rows int64 [min(P, num_groups)], the groups to train on, ascending; how many more mixed
        ones it takes).

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
    mixed = (num_correct > 0) & (num_correct < group_size)
    kept = mixed.nonzero().squeeze(1)[:num_groups]
    missing = num_groups - kept.numel()
    others = (~mixed).nonzero().squeeze(1)[:missing]
    return torch.cat([kept, others]).sort().values, missing


def next_round_size(missing: int, num_mixed: int, num_sampled: int, num_groups: int) -> int:
    """How many prompts to sample next.

        ceil((m + sqrt(m * (1 - p))) / p),   p = num_mixed / num_sampled,   at most num_groups

    m / p prompts hold m mixed groups on average; the root is one standard deviation of the number
    that it takes. It is asked for too, because another round takes as long as its longest response.

    Source: DAPO (arXiv 2503.14476, section 3.2) samples until the batch is full; the size of a
    round is ours (mean and deviation of the negative binomial distribution).

    Args:
        missing: m, mixed groups that the step lacks, at least 1.
        num_mixed, num_sampled: of the groups sampled in this step so far.
        num_groups: groups that a step trains on: a round is never larger.

    Returns:
        1 .. num_groups; num_groups as long as no group was mixed.
    """
    if num_mixed == 0:
        return num_groups
    rate = num_mixed / num_sampled
    return min(num_groups, math.ceil((missing + math.sqrt(missing * (1 - rate))) / rate))

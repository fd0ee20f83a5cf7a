"""Advantages without a critic: each response relative to its group."""

from __future__ import annotations

import torch
from torch import Tensor

from vapo_megatron.algorithm.reduction import require_wide
from vapo_megatron.algorithm.statistics import mean_and_variance

ESTIMATORS = ("grpo", "dr_grpo")
EPSILON = 1e-6


@torch.no_grad()
def group_sums(rewards: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """One rank's partial sums for group_advantages; a group may be spread over ranks.

    Args:
        rewards: [B] float32 or float64, r, one per response.
        groups: int64 [B] in 0..num_groups-1; position // group_size if the responses of a group
            are adjacent (see repeat_for_group).
        num_groups: P, of the whole step, so that all ranks' sums have the same shape.

    Returns:
        float64 [P, 3]: count, sum and sum of squares of each group's rewards, to be summed over
        data-parallel ranks. With float32 rewards the result does not depend on how responses are
        distributed over ranks, up to the last digit of float64.

    Raises:
        ValueError: rewards below float32, or inconsistent shapes.
    """
    require_wide(rewards=rewards)
    _require_shapes(rewards, groups)
    wide = rewards.double()
    terms = torch.stack([torch.ones_like(wide), wide, wide.square()], dim=1)
    return terms.new_zeros(num_groups, 3).index_add_(0, groups.long(), terms)


@torch.no_grad()
def group_advantages(rewards: Tensor, groups: Tensor, sums: Tensor, estimator: str) -> Tensor:
    """Each response's reward minus its group's mean, optionally divided by the group's std.

        grpo:  A_i = (r_i - mean) / (std + 1e-6)         dr_grpo:  A_i = r_i - mean

    over the n responses of the group, with std^2 = sum_i (r_i - mean)^2 / (n - 1), the sample std.
    All tokens of a response share its advantage.

    Source: GRPO (arXiv 2402.03300, section 4.1.2) only says "std"; we follow TRL and verl, whose
    torch.std is the sample std. Dr.GRPO (arXiv 2503.20783).

    Args:
        rewards: [B] float32 or float64, r, of this rank's responses.
        groups: int64 [B] in 0..P-1, as in group_sums.
        sums: float64 [P, 3] from group_sums, summed over ranks.
        estimator: "grpo" or "dr_grpo".

    Returns:
        [B], rewards' dtype, without gradient. Exactly 0 in a group whose rewards are all equal, up
        to rounding (a variance below 1e-12 of the mean square), and in a group of one.

    Raises:
        ValueError: an unknown estimator, rewards below float32, inconsistent shapes.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f'advantage_estimator={estimator!r} must be "grpo" or "dr_grpo"')
    require_wide(rewards=rewards)
    _require_shapes(rewards, groups)
    if sums.ndim != 2 or sums.shape[1] != 3 or sums.dtype != torch.float64:
        raise ValueError(
            f"sums: shape {tuple(sums.shape)}, dtype {sums.dtype}; must be (P, 3) float64 from "
            "group_sums"
        )
    mean, variance = mean_and_variance(sums)
    scale = (variance > 0).double()
    if estimator == "grpo":
        # A group that varies has at least two responses.
        sample_variance = variance * sums[:, 0] / (sums[:, 0] - 1).clamp(min=1)
        scale = scale / (sample_variance.sqrt() + EPSILON)
    groups = groups.long()
    return ((rewards.double() - mean[groups]) * scale[groups]).to(rewards.dtype)


def _require_shapes(rewards: Tensor, groups: Tensor) -> None:
    if rewards.ndim != 1 or groups.shape != rewards.shape or groups.is_floating_point():
        raise ValueError(
            f"rewards.shape={tuple(rewards.shape)} and groups: shape {tuple(groups.shape)}, dtype "
            f"{groups.dtype}; both must be (B,), groups integers"
        )

"""Correct for differing token probabilities in inference engine and trainer: reweight or drop."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vapo_megatron.algorithm.reduction import keep, require_mask, require_wide, token_means

# exp(-80) and exp(80) are within the range of float32.
LARGEST_LOG_RATIO = 80.0


def held_log_ratio(log_ratio: Tensor) -> Tensor:
    """Log-ratios within LARGEST_LOG_RATIO; 0 for NaN. For metrics, which stay finite."""
    return log_ratio.nan_to_num(nan=0.0).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


@torch.no_grad()
def truncated_importance_mask(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    cap: float,
    num_tokens: int | Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Truncated importance sampling: weight each token by its capped probability ratio.

        k_t = exp(old_logprobs_t - rollout_logprobs_t),   policy_mask_t = mask_t * min(k_t, cap)

    Source: truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training"), C = 2.

    Args:
        old_logprobs: [T] float32 or float64, of the trainer, before this step's updates.
        rollout_logprobs: [T], of the inference engine, with the same weights.
        loss_mask: [T] bool, or float weights.
        cap: C, above 0.
        num_tokens: N, int or 0-d tensor: tokens whose loss_mask is not 0, summed over all
            microbatches and data-parallel ranks that the metrics are a mean over.

    Returns:
        policy_mask, float32 [T], without gradient: the loss_mask of token_weights. It is above 0
        wherever loss_mask is (k is clamped to at least exp(-80)), so that loss_count does not
        change. Metrics, 0-d tensors divided by N, so that sums over microbatches and ranks are
        global means: sampler_ratio, k before the cap (at most exp(80)); sampler_corrected_fraction,
        tokens above the cap.

    Raises:
        ValueError: a dtype below float32, a cap not above 0.
    """
    if not cap > 0:
        raise ValueError(f"tis_cap={cap} must be above 0")
    log_ratio = _log_ratio(old_logprobs, rollout_logprobs, loss_mask)
    weights = log_ratio.clamp(max=math.log(cap)).exp()
    capped = log_ratio > math.log(cap)
    return _policy_mask(weights, loss_mask), _metrics(log_ratio, capped, loss_mask, num_tokens)


@torch.no_grad()
def icepop_mask(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    low: float,
    high: float,
    num_tokens: int | Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """IcePop: weight each token by its probability ratio, drop tokens outside a range of ratios.

        k_t = exp(old_logprobs_t - rollout_logprobs_t)
        policy_mask_t = mask_t * k_t where low <= k_t <= high, 0 elsewhere

    Source: IcePop (Ring-1T, arXiv 2510.18855), double-sided masking; low 0.5, high 5.

    Args:
        old_logprobs: [T] float32 or float64, of the trainer, before this step's updates.
        rollout_logprobs: [T], of the inference engine, with the same weights.
        loss_mask: [T] bool, or float weights.
        low: above 0 and at most 1.
        high: at least 1.
        num_tokens: N, int or 0-d tensor: tokens whose loss_mask is not 0, before any is dropped,
            summed over all microbatches and data-parallel ranks that the metrics are a mean over.

    Returns:
        policy_mask, float32 [T], without gradient: the loss_mask of token_weights. It is 0 for
        dropped tokens, which loss_count then leaves out of the denominator. Metrics, 0-d tensors
        divided by N, so that sums over microbatches and ranks are global means: sampler_ratio, k
        of all tokens (at most exp(80)); sampler_corrected_fraction, dropped tokens.

    Raises:
        ValueError: a dtype below float32, a range that does not contain 1 or includes 0.
    """
    if not 0 < low <= 1 <= high:
        raise ValueError(
            f"icepop_low={low} must lie in (0, 1] and icepop_high={high} must be at least 1"
        )
    log_ratio = _log_ratio(old_logprobs, rollout_logprobs, loss_mask)
    ratio = log_ratio.exp()
    inside = (ratio >= low) & (ratio <= high)
    weights = torch.where(inside, ratio, 0)
    return _policy_mask(weights, loss_mask), _metrics(log_ratio, ~inside, loss_mask, num_tokens)


def _log_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """float32 or wider [T]: log k where a token is trained on, else 0."""
    require_wide(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs)
    require_mask(loss_mask)
    log_ratio = keep(old_logprobs - rollout_logprobs, loss_mask)
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def _policy_mask(weights: Tensor, loss_mask: Tensor) -> Tensor:
    return (loss_mask * weights).float()


def _metrics(
    log_ratio: Tensor, corrected: Tensor, loss_mask: Tensor, num_tokens: int | Tensor
) -> dict[str, Tensor]:
    terms = {"sampler_ratio": log_ratio.exp(), "sampler_corrected_fraction": corrected}
    return token_means(terms, loss_mask, num_tokens, log_ratio.dtype)

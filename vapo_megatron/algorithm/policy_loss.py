"""The clipped policy loss with clip-higher, and the token weights of its aggregations."""

from __future__ import annotations

import torch
from torch import Tensor

from vapo_megatron.algorithm.reduction import (
    global_mean,
    keep,
    require_mask,
    require_wide,
    token_means,
    trained_lengths,
    trained_on,
)
from vapo_megatron.algorithm.sampler_correction import LARGEST_LOG_RATIO, held_log_ratio


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    num_tokens: int | Tensor,
    num_trained_tokens: int | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate with separate lower and upper clips, averaged over all tokens.

        ratio_t = exp(logprobs_t - old_logprobs_t)
        L = -1/N * sum_t mask_t * min(ratio_t * A_t, clipped_t * A_t)
        clipped_t = clip(ratio_t, 1 - clip_low, 1 + clip_high)

    Source: VAPO (arXiv 2504.05118), clip-higher and token-level loss; DAPO (arXiv 2503.14476). With
    clip_high = clip_low it is PPO's (arXiv 1707.06347, eq. 7).

    Args:
        logprobs: [T] float32 or float64, of the policy being trained; carries the gradient.
        old_logprobs: [T], of the policy before this step's updates.
        advantages: [T], A.
        loss_mask: [T] bool, or float weights (see token_weights).
        clip_low: in [0, 1]; with A < 0, ratios below 1 - clip_low get no gradient.
        clip_high: at least 0; with A > 0, ratios above 1 + clip_high get no gradient.
        num_tokens: N, int or 0-d tensor: loss_count summed over all microbatches and data-parallel
            ranks of the mini-batch.
        num_trained_tokens: tokens whose mask is not 0, summed over the same; None: N, which is the
            same unless loss_mask has weights.

    Returns:
        The loss, a 0-d tensor: this microbatch's term of the global mean, exactly 0 with its graph
        intact if N is 0. Metrics, detached 0-d tensors, whose sums over microbatches and ranks are
        unweighted means over the trained tokens: approx_kl, KL(old || new) by
        the k3 estimator ratio - 1 - log(ratio), finite where they are not; clip_fraction_low and
        clip_fraction_high, tokens whose gradient the lower or upper clip removes.

    Raises:
        ValueError: a dtype below float32, a clip out of range.
    """
    require_wide(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    require_mask(loss_mask)
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(
            f"clip_low={clip_low} must lie in [0, 1] and clip_high={clip_high} must be at least 0"
        )
    log_ratio, advantages = keep(logprobs - old_logprobs, loss_mask), keep(advantages, loss_mask)
    # exp(1000) * 0 is NaN: of an advantage of 0, and of a gradient that the upper clip removes.
    near = torch.where(advantages > 0, log_ratio.clamp(max=LARGEST_LOG_RATIO), log_ratio)
    ratio = torch.where(advantages == 0, 0, near).exp()
    surrogate = torch.minimum(
        ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    )
    loss = global_mean(-surrogate, loss_mask, num_tokens)
    count = num_tokens if num_trained_tokens is None else num_trained_tokens
    with torch.no_grad():
        terms = {
            "approx_kl": _k3(log_ratio),
            "clip_fraction_low": (ratio < 1 - clip_low) & (advantages < 0),
            "clip_fraction_high": (ratio > 1 + clip_high) & (advantages > 0),
        }
    return loss, token_means(terms, loss_mask, count, loss.dtype)


def _k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x; where that is not finite, that of the nearest x up to LARGEST_LOG_RATIO."""
    exact, held = log_ratio.expm1() - log_ratio, held_log_ratio(log_ratio)
    return torch.where(exact.isfinite(), exact, held.expm1() - held)


@torch.no_grad()
def ratio_difference(
    logprobs: Tensor,
    old_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    high: float,
    num_tokens: int | Tensor,
) -> dict[str, Tensor]:
    """How far the trained tokens' ratios are from 1; rounding before a step's first update.

        d_t = |exp(logprobs_t - old_logprobs_t) - 1|

    Args:
        logprobs, old_logprobs: [T] float32 or float64.
        loss_mask: [T] bool, or float weights.
        high: see agreement.py.
        num_tokens: tokens whose mask is not 0, summed over all microbatches and data-parallel ranks
            of the mini-batch.

    Returns:
        0-d tensors, detached. ratio_diff_mean and ratio_diff_high_fraction (of the tokens, those
        with d > high): sum them over microbatches and ranks. ratio_diff_max: take the maximum.
    """
    require_wide(logprobs=logprobs, old_logprobs=old_logprobs)
    require_mask(loss_mask)
    difference = keep(logprobs - old_logprobs, loss_mask).expm1().abs()
    terms = {"ratio_diff_mean": difference, "ratio_diff_high_fraction": difference > high}
    return {
        **token_means(terms, loss_mask, num_tokens, difference.dtype),
        "ratio_diff_max": torch.cat([difference, difference.new_zeros(1)]).max(),
    }


def token_weights(
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    loss_aggregation: str,
    *,
    max_response_tokens: int | None = None,
) -> Tensor:
    """Weights that make a loss average per token or per response.

        token:  w_t = mask_t   sample:  w_t = mask_t / |o_i|   constant:  w_t = mask_t / L

    with |o_i| the number of tokens of response i whose mask is not 0, and L a constant. The
    matching denominator is loss_count.

    Source: VAPO (arXiv 2504.05118), token-level loss; its PPO baseline uses the
    sample-level loss; Dr.GRPO (arXiv 2503.20783), constant.

    Args:
        loss_mask: [T] bool, or float weights; a weight of 0 drops the token.
        cu_seqlens: integer [B+1], boundaries of the responses in T; responses may be empty.
        loss_aggregation: "token", "sample" or "constant".
        max_response_tokens: L, the limit of the response length; used only by "constant".

    Returns:
        float32 [T].

    Raises:
        ValueError: an invalid dtype of loss_mask, an unknown loss_aggregation, "constant" without
            L >= 1.
    """
    require_mask(loss_mask)
    _require_aggregation(loss_aggregation)
    weights = loss_mask.float()
    if loss_aggregation == "token":
        return weights
    if loss_aggregation == "constant":
        if max_response_tokens is None or max_response_tokens < 1:
            raise ValueError(
                f"max_response_tokens={max_response_tokens} must be at least 1 for "
                'loss_aggregation="constant"'
            )
        return weights / max_response_tokens
    lengths = cu_seqlens.diff().long()
    per_response = trained_lengths(loss_mask, cu_seqlens).clamp(min=1)
    return weights / per_response.repeat_interleave(lengths, output_size=loss_mask.numel())


def loss_count(loss_mask: Tensor, cu_seqlens: Tensor, loss_aggregation: str) -> Tensor:
    """This rank's part of the denominator for token_weights.

        token:  tokens whose mask is not 0
        sample, constant:  responses with at least one such token

    Sum it over all microbatches and data-parallel ranks of the mini-batch, once, before the first
    microbatch.

    Args:
        loss_mask: [T] bool, or float weights, before token_weights.
        cu_seqlens: integer [B+1], boundaries of the responses in T.
        loss_aggregation: "token", "sample" or "constant".

    Returns:
        int64 0-d tensor.

    Raises:
        ValueError: an invalid dtype of loss_mask, an unknown loss_aggregation.
    """
    require_mask(loss_mask)
    _require_aggregation(loss_aggregation)
    if loss_aggregation == "token":
        return trained_on(loss_mask).sum()
    return (trained_lengths(loss_mask, cu_seqlens) > 0).sum()


def _require_aggregation(loss_aggregation: str) -> None:
    if loss_aggregation not in ("token", "sample", "constant"):
        raise ValueError(
            f'loss_aggregation={loss_aggregation!r} must be "token", "sample" or "constant"'
        )

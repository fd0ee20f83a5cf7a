"""Policy losses relative to the inference engine's policy; they drop tokens that moved too far.

Its log-probabilities take the place of old ones, so that staleness, a mismatch of engine and
trainer, and the step's own updates are one ratio. Dropped tokens stay in the
denominators: SAO's mean is over all tokens, and a count without them, which depends on the policy
of the very forward pass, would need a forward pass over the mini-batch of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vapo_megatron.algorithm.reduction import (
    global_mean,
    keep,
    require_mask,
    require_wide,
    token_means,
    trained_on,
)
from vapo_megatron.algorithm.sampler_correction import held_log_ratio


def dis_policy_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    low: float,
    high: float,
    num_tokens: int | Tensor,
    num_trained_tokens: int | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DIS: the policy gradient weighted by the ratio to the inference engine, if not too far.

        r_t = exp(logprobs_t - rollout_logprobs_t)
        f_t = r_t if 1 - low < r_t < 1 + high, else 0        whatever the sign of A_t
        L = -1/N * sum_t mask_t * f_t * A_t * logprobs_t     f is a constant: it has no gradient

    Source: SAO (arXiv 2607.07508), L = E[f(r) A log pi]; low 0.3 and high 5 for reasoning, 0.8 and
    3 for code.

    Args:
        logprobs: [T] float32 or float64, of the policy being trained; carries the gradient.
        rollout_logprobs: [T], of the inference engine.
        advantages: [T], A.
        loss_mask: [T] bool, or float weights (see token_weights).
        low: in (0, 1].
        high: above 0.
        num_tokens: N, int or 0-d tensor: loss_count summed over all microbatches and data-parallel
            ranks of the mini-batch; tokens that f drops count.
        num_trained_tokens: tokens whose mask is not 0, summed over the same; None: N, which is the
            same unless loss_mask has weights.

    Returns:
        The loss, a 0-d tensor: this microbatch's term of the global mean, exactly 0 with its graph
        intact if N is 0. Metrics, detached 0-d tensors, whose sums over microbatches and ranks are
        unweighted means over the trained tokens: approx_kl, KL(engine || new) by the k3 estimator;
        clip_fraction_low and clip_fraction_high, tokens dropped below and above.

    Raises:
        ValueError: a dtype below float32, a bound out of range.
    """
    _require(logprobs, rollout_logprobs, advantages, loss_mask)
    if not (0 < low <= 1 and high > 0):
        raise ValueError(f"low={low} must lie in (0, 1] and high={high} must be above 0")
    with torch.no_grad():
        log_ratio = keep(logprobs - rollout_logprobs, loss_mask)
        ratio = log_ratio.exp()
        below, above = ratio <= 1 - low, ratio >= 1 + high
        factor = torch.where(below | above, 0, ratio)
    return _weighted_gradient(
        factor, log_ratio, (below, above), advantages, logprobs, loss_mask,
        num_tokens, num_trained_tokens,
    )  # fmt: skip


def dppo_tv_policy_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    max_difference: float,
    ratio_cap: float,
    num_tokens: int | Tensor,
    num_trained_tokens: int | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPPO with total variation: tokens whose probability moved too far already are dropped.

        pi_t = exp(logprobs_t),  mu_t = exp(rollout_logprobs_t),  r_t = pi_t / mu_t
        keep_t = (A_t > 0 and pi_t - mu_t <= d) or (A_t <= 0 and pi_t - mu_t >= -d)
        L = -1/N * sum_t mask_t * keep_t * min(r_t, cap) * A_t * logprobs_t
        keep and min(r, cap) are constants: they have no gradient

    Other than a clip of the ratio, the difference of probabilities lets a rare token grow, and
    binds a frequent one.

    Source: DPPO (arXiv 2602.04879), the binary approximation of the total variation; d and the cap
    of 20 as in BPCO (arXiv 2608.23566), which averages within each response first.

    Args:
        logprobs: [T] float32 or float64, of the policy being trained; carries the gradient.
        rollout_logprobs: [T], of the inference engine.
        advantages: [T], A.
        loss_mask: [T] bool, or float weights (see token_weights).
        max_difference: d, in (0, 1].
        ratio_cap: cap, at least 1.
        num_tokens: N, int or 0-d tensor: loss_count summed over all microbatches and data-parallel
            ranks of the mini-batch; dropped tokens count.
        num_trained_tokens: tokens whose mask is not 0, summed over the same; None: N, which is the
            same unless loss_mask has weights.

    Returns:
        As dis_policy_loss; clip_fraction_low: dropped with A <= 0, clip_fraction_high: with A > 0.

    Raises:
        ValueError: a dtype below float32, a bound out of range.
    """
    _require(logprobs, rollout_logprobs, advantages, loss_mask)
    if not (0 < max_difference <= 1 and ratio_cap >= 1):
        raise ValueError(
            f"max_difference={max_difference} must lie in (0, 1] and ratio_cap={ratio_cap} must be "
            "at least 1"
        )
    with torch.no_grad():
        log_ratio = keep(logprobs - rollout_logprobs, loss_mask)
        moved = keep(logprobs.exp() - rollout_logprobs.exp(), loss_mask)
        below = (advantages <= 0) & (moved < -max_difference)
        above = (advantages > 0) & (moved > max_difference)
        factor = torch.where(below | above, 0, log_ratio.exp().clamp(max=ratio_cap))
    return _weighted_gradient(
        factor, log_ratio, (below, above), advantages, logprobs, loss_mask,
        num_tokens, num_trained_tokens,
    )  # fmt: skip


def _require(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor
) -> None:
    require_wide(logprobs=logprobs, rollout_logprobs=rollout_logprobs, advantages=advantages)
    require_mask(loss_mask)


def _weighted_gradient(
    factor: Tensor,
    log_ratio: Tensor,
    dropped: tuple[Tensor, Tensor],
    advantages: Tensor,
    logprobs: Tensor,
    loss_mask: Tensor,
    num_tokens: int | Tensor,
    num_trained_tokens: int | Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-factor * A * log pi of each token, with a factor without gradient, and both losses' metrics.

    dropped: bool [T] twice, the tokens counted in clip_fraction_low and in clip_fraction_high.
    """
    # What is dropped, or has no advantage, may have logprobs that are not finite.
    counts = trained_on(loss_mask) & (advantages != 0) & (factor != 0)
    terms = keep(factor, counts) * keep(advantages, counts) * keep(logprobs, counts)
    loss = global_mean(-terms, loss_mask, num_tokens)
    held = held_log_ratio(log_ratio)
    below, above = dropped
    metrics = {
        "approx_kl": held.expm1() - held,
        "clip_fraction_low": below,
        "clip_fraction_high": above,
    }
    count = num_tokens if num_trained_tokens is None else num_trained_tokens
    return loss, token_means(metrics, loss_mask, count, log_ratio.dtype)

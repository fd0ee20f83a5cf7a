"""KL loss of the policy against a frozen reference policy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vapo_megatron.algorithm.reduction import (
    global_mean,
    keep,
    require_mask,
    require_wide,
    token_means,
)

# exp(20) is 5e8; even its square is far from overflowing float32.
LARGEST_LOG_RATIO = 20.0


def reference_kl(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    num_tokens: int | Tensor,
    num_trained_tokens: int | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """KL(policy || reference) on tokens sampled from the policy, by the k3 estimator.

        d_t = reference_logprobs_t - logprobs_t
        L = 1/N * sum_t mask_t * (exp(d_t) - d_t - 1)
        dL/dlogprobs_t = 1/N * mask_t * (1 - exp(d_t))

    Beyond d = 20, exp(d) is replaced by its tangent at 20, which bounds the gradient by exp(20) and
    keeps the loss smooth. A clamp would remove the gradient just where the policy is farthest from
    the reference.

    Source: GRPO (arXiv 2402.03300, eq. 4); the estimator is Schulman's k3 ("Approximating KL
    divergence", 2020). The trainer adds kl_coef * L to the policy loss.

    Args:
        logprobs: [T] float32 or float64, of the policy being trained; carries the gradient.
        reference_logprobs: [T], of the frozen reference; no gradient passes into it.
        loss_mask: [T] bool, or float weights (see token_weights).
        num_tokens: N, int or 0-d tensor: loss_count summed over all microbatches and data-parallel
            ranks of the mini-batch.
        num_trained_tokens: tokens whose mask is not 0, summed over the same; None: N, which is the
            same unless loss_mask has weights.

    Returns:
        The loss, a 0-d tensor: this microbatch's term of the global mean, exactly 0 with its graph
        intact if N is 0. It is at least 0, and infinite if the reference gives a token probability
        0 (d = -inf). Metrics, detached 0-d tensors, whose sums over microbatches and ranks are
        unweighted means over the trained tokens: reference_kl, of exp(d_t) - d_t - 1;
        reference_kl_tangent_fraction, tokens beyond d = 20.

    Raises:
        ValueError: a dtype below float32.
    """
    require_wide(logprobs=logprobs, reference_logprobs=reference_logprobs)
    require_mask(loss_mask)
    distance = keep(reference_logprobs.detach() - logprobs, loss_mask)
    beyond = distance > LARGEST_LOG_RATIO
    # torch.where rather than a sum of both parts, in which 1 - exp(d) would be lost to rounding
    # next to exp(20). expm1 keeps the digits of d^2/2 that exp(d) - 1 loses.
    near = distance.clamp(max=LARGEST_LOG_RATIO)
    slope = math.expm1(LARGEST_LOG_RATIO)
    tangent = slope * (distance - LARGEST_LOG_RATIO) + (slope - LARGEST_LOG_RATIO)
    terms = torch.where(beyond, tangent, near.expm1() - near)
    loss = global_mean(terms, loss_mask, num_tokens)
    count = num_tokens if num_trained_tokens is None else num_trained_tokens
    metrics = {"reference_kl": terms, "reference_kl_tangent_fraction": beyond}
    return loss, token_means(metrics, loss_mask, count, loss.dtype)

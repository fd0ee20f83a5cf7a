"""Positive-example language-model loss: imitate the responses that the verifier found correct."""

from __future__ import annotations

import torch
from torch import Tensor

from vapo_megatron.algorithm.reduction import global_mean, keep, require_mask, require_wide


def positive_lm_loss(
    logprobs: Tensor,
    loss_mask: Tensor,
    is_correct: Tensor,
    *,
    num_positive_tokens: int | Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """Negative log-likelihood of the correct responses.

        L = -1/N * sum_{t in correct responses} mask_t * w_t * logprobs_t

    Source: VAPO (arXiv 2504.05118), positive-example LM loss, with w_t = 1; the trainer adds mu * L
    to the policy loss. With w_t from imitation_weights it is that of self-imitation learning (SIL,
    arXiv 1806.05635, equation 2), which VAPO names as its root.

    Args:
        logprobs: [T] float32 or float64, of the policy being trained; carries the gradient.
        loss_mask: [T] bool, or float weights.
        is_correct: bool [T], the verifier's verdict (not the shaped reward) spread over each
            response's tokens.
        num_positive_tokens: N, int or 0-d tensor: tokens of correct responses whose mask is not 0,
            summed over all microbatches and data-parallel ranks of the mini-batch; not the
            num_tokens of the policy loss.
        weights: w, [T] float32 or float64, without gradient; None: 1. They are not part of N.

    Returns:
        0-d tensor, this microbatch's term of the global mean; exactly 0 with its graph intact if N
        is 0.

    Raises:
        ValueError: logprobs, weights or a float mask below float32, or is_correct not bool.
    """
    require_wide(logprobs=logprobs)
    require_mask(loss_mask)
    if is_correct.dtype != torch.bool:
        raise ValueError(
            f"is_correct.dtype={is_correct.dtype} must be bool; pass is_correct.bool()"
        )
    positive = loss_mask * is_correct
    if weights is not None:
        require_wide(weights=weights)
        positive = positive * weights
    return global_mean(-keep(logprobs, positive), positive, num_positive_tokens)


def imitation_weights(returns: Tensor, values: Tensor) -> Tensor:
    """Weights of self-imitation learning: imitate only what came out better than expected.

        w_t = max(R_t - V_t, 0)

    Source: SIL (arXiv 1806.05635), equation 2. There R is the discounted Monte-Carlo return; here
    it is the critic's target, which is the same with lambda_critic 1.

    Args:
        returns: R, [T] float32 or float64.
        values: V, [T], of the state before each token, from before the update.

    Returns:
        [T], not negative, without gradient.

    Raises:
        ValueError: a dtype below float32.
    """
    require_wide(returns=returns, values=values)
    return (returns - values).clamp(min=0).detach()

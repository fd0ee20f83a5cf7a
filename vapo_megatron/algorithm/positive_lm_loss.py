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
) -> Tensor:
    """Negative log-likelihood of the correct responses.

        L = -1/N * sum_{t in correct responses} mask_t * logprobs_t

    Source: VAPO (arXiv 2504.05118), positive-example LM loss; the trainer adds mu * L to the policy
    loss.

    Args:
        logprobs: [T] float32 or float64, of the policy being trained; carries the gradient.
        loss_mask: [T] bool, or float weights.
        is_correct: bool [T], the verifier's verdict (not the shaped reward) spread over each
            response's tokens.
        num_positive_tokens: N, int or 0-d tensor: tokens of correct responses whose mask is not 0,
            summed over all microbatches and data-parallel ranks of the mini-batch; not the
            num_tokens of the policy loss.

    Returns:
        0-d tensor, this microbatch's term of the global mean; exactly 0 with its graph intact if N
        is 0.

    Raises:
        ValueError: logprobs or float weights below float32, or is_correct not bool.
    """
    require_wide(logprobs=logprobs)
    require_mask(loss_mask)
    if is_correct.dtype != torch.bool:
        raise ValueError(
            f"is_correct.dtype={is_correct.dtype} must be bool; pass is_correct.bool()"
        )
    weights = loss_mask * is_correct
    return global_mean(-keep(logprobs, weights), weights, num_positive_tokens)

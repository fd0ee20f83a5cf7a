"""Shared by all losses: dtype checks, masking that NaN cannot leak through, global means."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

WIDE = (torch.float32, torch.float64)


def require_wide(**tensors: Tensor | None) -> None:
    """Reject dtypes below float32.

    For example, lambda at length 16384 is 0.99878, which bfloat16 rounds to 1.0.

    Args:
        tensors: name -> tensor; None is skipped.

    Raises:
        ValueError: names the tensor and its dtype.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in WIDE:
            raise ValueError(
                f"{name}.dtype={tensor.dtype} must be float32 or float64; pass {name}.float()"
            )


def require_mask(loss_mask: Tensor) -> None:
    """Reject a loss mask that is neither bool nor float32 or wider.

    Raises:
        ValueError: names the dtype.
    """
    if loss_mask.dtype != torch.bool and loss_mask.dtype not in WIDE:
        raise ValueError(
            f"loss_mask.dtype={loss_mask.dtype} must be bool, float32 or float64; "
            "pass loss_mask.bool()"
        )


def trained_on(loss_mask: Tensor) -> Tensor:
    """bool [T]: True where a token's weight is not 0."""
    return loss_mask if loss_mask.dtype == torch.bool else loss_mask != 0


def trained_lengths(loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """int64 [B]: tokens of each response whose weight is not 0.

    Args:
        loss_mask: [T] bool, or float weights.
        cu_seqlens: integer [B+1], boundaries of the responses in T; responses may be empty.
    """
    before = torch.zeros(loss_mask.numel() + 1, dtype=torch.long, device=loss_mask.device)
    torch.cumsum(trained_on(loss_mask), 0, out=before[1:])
    return before[cu_seqlens.long()].diff()


def keep(x: Tensor, loss_mask: Tensor) -> Tensor:
    """x where a token is trained on, else 0; masked inf or NaN never reach a sum or gradient."""
    return torch.where(trained_on(loss_mask), x, 0)


def global_mean(terms: Tensor, loss_mask: Tensor, count: int | float | Tensor) -> Tensor:
    """One microbatch's term of a mean over all microbatches and ranks.

        sum_t mask_t * terms_t / count;   exactly 0, graph intact, if count is 0

    Args:
        terms: [T], 0 where the mask is 0 (see keep).
        loss_mask: [T], bool or float weights.
        count: number or 0-d tensor, summed over all microbatches and data-parallel ranks of the
            mini-batch.

    Returns:
        0-d tensor of terms' dtype.
    """
    total = (terms * loss_mask).sum()
    # Dividing by inf gives 0 in value and gradient without a branch that would sync the device.
    if isinstance(count, Tensor):
        return total / torch.where(count == 0, math.inf, count).to(total.dtype)
    return total / (count or math.inf)


@torch.no_grad()
def token_means(
    terms: Mapping[str, Tensor], loss_mask: Tensor, count: int | Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """One microbatch's terms of unweighted means over the tokens that are trained on, 0-d each.

    Args:
        terms: name -> [T], numbers or bool; masked ones are left out.
        loss_mask: [T], bool or float weights.
        count: tokens whose mask is not 0, as for global_mean.
        dtype: of the means.
    """
    trained = trained_on(loss_mask)
    return {
        name: global_mean(keep(x.to(dtype), trained), trained, count) for name, x in terms.items()
    }

"""Overlong filtering: a truncated response's reward says nothing about its reasoning."""

from __future__ import annotations

import torch
from torch import Tensor

from vapo_megatron.algorithm.reduction import require_mask


def without_truncated(loss_mask: Tensor, truncated: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mask truncated responses out of the loss.

        mask_t = 0 for every token of a truncated response

    They do not count in the denominators either (see loss_count).

    Source: DAPO (arXiv 2503.14476, section 3.4), overlong filtering.

    Args:
        loss_mask: [T] bool, or float weights.
        truncated: bool [B], Rollout.truncated.
        cu_seqlens: integer [B+1], boundaries of the responses in T; responses may be empty.

    Returns:
        [T], loss_mask's dtype.

    Raises:
        ValueError: an invalid dtype of loss_mask, or truncated is not bool [B].
    """
    require_mask(loss_mask)
    if truncated.shape != (cu_seqlens.numel() - 1,) or truncated.dtype != torch.bool:
        raise ValueError(
            f"truncated: shape {tuple(truncated.shape)}, dtype {truncated.dtype}; must be (B,) = "
            f"({cu_seqlens.numel() - 1},) bool"
        )
    finished = ~truncated.repeat_interleave(cu_seqlens.diff().long(), output_size=loss_mask.numel())
    return loss_mask * finished

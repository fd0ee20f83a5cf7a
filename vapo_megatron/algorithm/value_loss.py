"""The critic's regression on returns, and values that are bounded as the returns are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vapo_megatron.algorithm.reduction import global_mean, keep, require_mask, require_wide


def ranged_values(head: Tensor, low: float, high: float) -> Tensor:
    """Bound the value head's output to the range of the returns.

        V = low + (high - low) * (1/2 + atan(head) / pi)
        dV/dhead = (high - low) / (pi * (1 + head^2))

    A head of 0 is the middle of the range. V reaches the ends only in the limit, but there the
    gradient falls with the square of the head, not exponentially as a tanh's.

    Source: BPCO (arXiv 2608.23566), [Rmin, Rmax] = [low, high].

    Args:
        head: [T] float32 or float64, the value head's output; carries the gradient.
        low, high: finite, low below high; in units of reward.

    Returns:
        [T], head's dtype, in [low, high].

    Raises:
        ValueError: a dtype below float32, or a range that is not finite or is empty.
    """
    require_wide(head=head)
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"value_range=[{low}, {high}] must be finite with low below high")
    share = 0.5 + torch.atan(head) / math.pi
    return low + (high - low) * share


def value_loss(
    values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    num_tokens: int | Tensor,
    old_values: Tensor | None = None,
    clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error of the values, optionally clipped around the old values.

        L = 1/N * sum_t mask_t * 0.5 * (V_t - R_t)^2
        with a clip c: per token, the larger of this and the same with V_t clamped to V_old_t -+ c

    Source: VAPO (arXiv 2504.05118) does not give the form; the half and the clip follow PPO
    implementations (arXiv 1707.06347, and 2005.12729 for the clip). Unclipped by default.

    Args:
        values: [T] float32 or float64, V of the state before each response token; carries the
            gradient.
        returns: [T], regression targets R.
        loss_mask: [T] bool, or float weights.
        num_tokens: N, int or 0-d tensor: tokens whose mask is not 0, summed over all microbatches
            and data-parallel ranks of the mini-batch (or responses, for weights that average within
            each response).
        old_values: [T], V before this step's updates; used only with a clip.
        clip: c > 0, or None.

    Returns:
        The loss, a 0-d tensor: this microbatch's term of the global mean, exactly 0 with its graph
        intact if N is 0. Metrics, detached 0-d tensors divided by N, so that sums over
        microbatches and ranks are global means: value_mean, return_mean, value_clip_fraction
        (tokens whose gradient the clip removes).

    Raises:
        ValueError: a dtype below float32, or a clip without old_values.
    """
    require_wide(values=values, returns=returns, old_values=old_values)
    require_mask(loss_mask)
    error = keep(values - returns, loss_mask)
    squared, clipped = error.square(), torch.zeros_like(error)
    if clip is not None:
        if old_values is None:
            raise ValueError(
                f"value_loss with clip={clip} needs old_values; pass them or clip=None"
            )
        near_old = old_values + (values - old_values).clamp(-clip, clip)
        # PPO's pessimistic clip: the larger of both errors.
        held = keep(near_old - returns, loss_mask).square()
        clipped = (held > squared).to(error.dtype)
        squared = torch.maximum(squared, held)
    loss = global_mean(0.5 * squared, loss_mask, num_tokens)
    with torch.no_grad():
        metrics = {
            "value_mean": global_mean(keep(values, loss_mask), loss_mask, num_tokens),
            "return_mean": global_mean(keep(returns, loss_mask), loss_mask, num_tokens),
            "value_clip_fraction": global_mean(clipped, loss_mask, num_tokens),
        }
    return loss, metrics

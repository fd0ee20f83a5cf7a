"""Log-probabilities and entropy over a vocabulary that is split between tensor-parallel ranks.

Before: with N = V_padded/tp, rank r holds columns [r*N, (r+1)*N) of the logits, or those rows of
the output weight, and the same hidden states and targets as all others. After: every rank holds the
same log-probabilities and entropies, bit for bit, as each combines the statistics in rank order.

With z = logits / temperature over the vocabulary alone (padding is never read), m = max_j z_j,
    s = sum_j exp(z_j - m)          u = sum_j exp(z_j - m) (z_j - m)
    log p_t = z_t - m - log s       H = log s - u / s
    d log p_t / d z_j = [j = t] - p_j               d H / d z_j = -p_j (log p_j + H)
m, s, u and z_t of all tokens take one all-gather; the backward pass does not communicate.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.parallel.score_chunks import Call, Gradients, tiles


def vocab_parallel_logprobs(
    logits: Tensor, targets: Tensor, tp_group: dist.ProcessGroup | None, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """`linear_logprobs` of logits that exist already.

    Args:
        logits: [..., V_padded/tp], this rank's columns; bfloat16, float16, float32 or float64.
            Not modified; the gradient has their dtype.
        targets, tp_group, settings: as in `linear_logprobs`.
    """
    return linear_logprobs(logits, None, targets, tp_group, **settings)


def linear_logprobs(
    hidden: Tensor,
    weight_shard: Tensor | None,
    targets: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of the targets, and the distribution's entropy, from hidden states.

    log softmax(hidden @ weight_shard.T / temperature)[target], the softmax taken over `vocab_size`
    entries, without ever holding those logits: forward and backward hold no more than
    [chunk_size, V_padded/tp] scores, in all (a single row, with entropy, needs another); backward
    computes them again. Everything is float32 (float64 for float64 inputs), with one exception: on
    a CPU the products are rounded to the weight's dtype, as a linear layer's output is.

    The gradient of `hidden` is TP-partial: it is this rank's share, and its sum over the
    tensor-parallel ranks is the gradient. What made `hidden` the same on all ranks takes that sum
    (the backward of copy-to-tensor-parallel-region, or the reduce-scatter of sequence parallelism).
    The gradient of `weight_shard` is whole: accumulated in float32 over the chunks, returned in the
    weight's dtype.

    Args:
        hidden: [..., H], the same on every rank; a rank-dependent slice is an error of the caller.
        weight_shard: [V_padded/tp, H], this rank's rows, same dtype as hidden. None: `hidden` is
            this rank's logits.
        targets: int64 [...], global vocabulary indices in [0, vocab_size), the same on every rank.
        tp_group: the tensor-parallel group; None where one process holds the whole vocabulary.
        vocab_size: entries of the unpadded vocabulary; columns beyond it get no probability and no
            gradient.
        temperature: divides the logits.
        with_entropy: also return -sum_j p_j log p_j, in nats.
        chunk_size: see score_chunks.py; None: what fits CHUNK_BYTES.

    Returns:
        (logprobs, entropy), each [...], float32 or float64, the same on every rank; entropy is None
        unless asked for. Both are differentiable.

    Raises:
        ValueError: shapes, dtypes, temperature, chunk size or targets that do not fit.
    """
    width = hidden.shape[-1]
    if weight_shard is not None:
        if hidden.dtype != weight_shard.dtype or width != weight_shard.shape[-1]:
            raise ValueError(
                f"hidden {list(hidden.shape)} {hidden.dtype} and weight_shard "
                f"{list(weight_shard.shape)} {weight_shard.dtype} must share dtype and last size; "
                "cast or slice one of them"
            )
        width = weight_shard.shape[0]
    call = Call.check(
        hidden.shape[:-1], width, hidden.dtype, targets, tp_group,
        vocab_size, temperature, with_entropy, chunk_size,
    )  # fmt: skip
    flat = hidden.reshape(-1, hidden.shape[-1])
    logprobs, entropy = _Logprobs.apply(flat, weight_shard, targets.reshape(-1), call)
    return logprobs.view(targets.shape), entropy.view(targets.shape) if with_entropy else None


class _Logprobs(torch.autograd.Function):
    """source: logits (weight None), or hidden states."""

    @staticmethod
    def forward(ctx, source, weight, targets, call: Call):  # type: ignore[no-untyped-def]
        statistics = _statistics(source, weight, targets, call)
        if call.tp_size > 1 and targets.numel():
            size, rows = statistics.shape
            gathered = statistics.new_empty((call.tp_size * size, rows))
            dist.all_gather_into_tensor(gathered, statistics, group=call.tp_group)
            gathered = gathered.view(call.tp_size, size, rows)
        else:
            gathered = statistics[None]
        maxima, sums, picked = gathered[:, 0], gathered[:, 1], gathered[:, 2].amax(0)
        maximum = maxima.amax(0)
        shift = maxima - maximum
        scale = shift.exp()
        total = (sums * scale).sum(0)
        log_total = total.log()
        # Subtracted in this order, the result keeps its digits when all logits are large.
        logprobs = (picked - maximum) - log_total
        entropy = None
        if call.with_entropy:
            weighted = (scale * (gathered[:, 3] + shift * sums)).sum(0)
            entropy = log_total - weighted / total
        ctx.save_for_backward(source, weight, targets, maximum, total, entropy)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[no-untyped-def]
        source, weight, targets, maximum, total, entropy = ctx.saved_tensors
        call: Call = ctx.call
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(maximum)
        # d z / d logits = 1 / temperature. With e_j = exp(z_j - m), p_j = e_j / total and
        # log p_j = (z_j - m) - log total: m + log total is never formed, it would round both.
        picked = (grad_logprobs / call.temperature)[:, None]
        offset = -picked / total[:, None]
        slope = None
        if grad_entropy is not None:
            slope = (grad_entropy / -(call.temperature * total))[:, None]
            offset += slope * (entropy - total.log())[:, None]
        gradients = Gradients(source, weight, call, ctx.needs_input_grad)
        for rows, z, scratch in tiles(
            source, weight, call, with_scratch=slope is not None, gradients=gradients
        ):
            z.sub_(maximum[rows, None])
            if slope is None:
                z.exp_().mul_(offset[rows])
            else:
                e = torch.exp(z, out=scratch)
                torch.addcmul(offset[rows], slope[rows], z, out=z).mul_(e)
            if call.columns:
                column, inside = call.local(targets[rows])
                z.scatter_add_(1, column, picked[rows] * inside)
        grad_source, grad_weight = gradients.result()
        return grad_source, grad_weight, None, None


def _statistics(source: Tensor, weight: Tensor | None, targets: Tensor, call: Call) -> Tensor:
    """This rank's m, s, z_t (-inf where it is another rank's) and, for the entropy, u."""
    num_rows = source.shape[0]
    statistics = source.new_zeros((4 if call.with_entropy else 3, num_rows), dtype=call.dtype)
    if call.columns == 0:
        # Finite, so that nothing becomes 0 * inf when ranks are combined; its weight is exp(-1e30).
        statistics[0] = -1e30
        statistics[2] = -math.inf
        return statistics
    for rows, z, scratch in tiles(source, weight, call, with_scratch=call.with_entropy):
        column, inside = call.local(targets[rows])
        statistics[2, rows] = z.gather(1, column).masked_fill_(~inside, -math.inf)[:, 0]
        maximum = z.amax(1)
        statistics[0, rows] = maximum
        z.sub_(maximum[:, None])
        e = z.exp_() if scratch is None else torch.exp(z, out=scratch)
        statistics[1, rows] = e.sum(1)
        if scratch is not None:
            statistics[3, rows] = e.mul_(z).sum(1)
    return statistics

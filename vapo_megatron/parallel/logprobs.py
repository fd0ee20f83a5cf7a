"""Log-probabilities and entropy over a vocabulary that is split between tensor-parallel ranks.

Before: with N = V_padded/tp, rank r holds columns [r*N, (r+1)*N) of the logits, or those rows of
the output weight, and the same hidden states and targets as all others. After: every rank holds the
same log-probabilities and entropies, bit for bit, as each combines the statistics in rank order.

With z = logits / temperature over the vocabulary alone (padding is never read), m = max_j z_j,
    s = sum_j exp(z_j - m)          u = sum_j exp(z_j - m) (z_j - m)
    log p_t = z_t - m - log s       H = log s - u / s
    d log p_t / d z_j = [j = t] - p_j               d H / d z_j = -p_j (log p_j + H)
m, s, u and z_t of all tokens travel in one all-gather; the backward pass communicates nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 96 * 2**20
"""Size of a chunk's scores [chunk, V/tp] when no chunk size is given; at most two are held."""


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of the targets, and the distribution's entropy, from sharded logits.

    log softmax(logits / temperature)[target], the softmax taken over `vocab_size` entries.

    Args:
        logits: [..., V_padded/tp], this rank's columns; bfloat16, float16, float32 or float64.
            Not modified.
        targets: int64 [...], global vocabulary indices in [0, vocab_size), the same on every rank.
        tp_group: the tensor-parallel group; None where one process holds the whole vocabulary.
        vocab_size: entries of the unpadded vocabulary; columns beyond it get no probability and no
            gradient.
        temperature: divides the logits.
        with_entropy: also return -sum_j p_j log p_j, in nats.
        chunk_size: rows worked on at once; None: as many as CHUNK_BYTES allows.

    Returns:
        (logprobs, entropy), each [...], float32 (float64 for float64 logits), the same on every
        rank; entropy is None unless asked for. Both are differentiable; the gradient has the dtype
        of the logits.

    Raises:
        ValueError: shapes, temperature, chunk size or targets that do not fit.
    """
    call = _Call.check(
        logits.shape[:-1], logits.shape[-1], logits.dtype, targets, tp_group,
        vocab_size, temperature, with_entropy, chunk_size,
    )  # fmt: skip
    flat = logits.reshape(-1, logits.shape[-1])
    return call.shaped(_Logprobs.apply(flat, None, targets.reshape(-1), call), targets.shape)


def linear_logprobs(
    hidden: Tensor,
    weight_shard: Tensor,
    targets: Tensor,
    tp_group: dist.ProcessGroup | None,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`vocab_parallel_logprobs` of `hidden @ weight_shard.T`, without ever holding those logits.

    Forward and backward hold the scores of `chunk_size` rows; backward computes them again. The
    products are rounded to the weight's dtype, as a linear layer's output is; all else is float32.

    The gradient of `hidden` is TP-partial: it is this rank's share, and its sum over the
    tensor-parallel ranks is the gradient. What made `hidden` the same on all ranks takes that sum
    (the backward of copy-to-tensor-parallel-region, or the reduce-scatter of sequence parallelism).
    The gradient of `weight_shard` is whole: accumulated in float32 over the chunks, returned in the
    weight's dtype.

    Args:
        hidden: [..., H], the same on every rank; a rank-dependent slice is an error of the caller.
        weight_shard: [V_padded/tp, H], this rank's rows, same dtype as hidden.
        targets: int64 [...], as in `vocab_parallel_logprobs`; so are all other arguments.
        tp_group: as there.
        vocab_size: as there.
        temperature: as there.
        with_entropy: as there.
        chunk_size: as there.

    Returns:
        (logprobs, entropy) as in `vocab_parallel_logprobs`.

    Raises:
        ValueError: shapes, dtypes, temperature, chunk size or targets that do not fit.
    """
    if hidden.dtype != weight_shard.dtype or hidden.shape[-1] != weight_shard.shape[-1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} {hidden.dtype} and weight_shard "
            f"{list(weight_shard.shape)} {weight_shard.dtype} must share dtype and last size; "
            "cast or slice one of them"
        )
    call = _Call.check(
        hidden.shape[:-1], weight_shard.shape[0], hidden.dtype, targets, tp_group,
        vocab_size, temperature, with_entropy, chunk_size,
    )  # fmt: skip
    flat = hidden.reshape(-1, hidden.shape[-1])
    return call.shaped(
        _Logprobs.apply(flat, weight_shard, targets.reshape(-1), call), targets.shape
    )


@dataclasses.dataclass(frozen=True)
class _Call:
    """What one call fixes besides its tensors."""

    tp_group: dist.ProcessGroup | None
    tp_size: int
    first: int
    """Global index of this rank's first column."""
    columns: int
    """This rank's columns that belong to the vocabulary; 0 on a rank that holds padding alone."""
    dtype: torch.dtype
    """Of the arithmetic."""
    temperature: float
    with_entropy: bool
    chunk_size: int

    @staticmethod
    def check(
        rows: torch.Size,
        width: int,
        dtype: torch.dtype,
        targets: Tensor,
        tp_group: dist.ProcessGroup | None,
        vocab_size: int,
        temperature: float,
        with_entropy: bool,
        chunk_size: int | None,
    ) -> _Call:
        """Check the arguments against each other; width: V_padded/tp."""
        tp_size, tp_rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
        if targets.shape != rows:
            raise ValueError(f"targets {list(targets.shape)} must have the shape {list(rows)}")
        if not 0 < vocab_size <= width * tp_size:
            raise ValueError(
                f"vocab_size={vocab_size} must lie in 1..{width * tp_size}, the padded vocabulary "
                f"of {tp_size} ranks together; pass the unpadded size and this rank's own shard"
            )
        if not temperature > 0 or (chunk_size is not None and chunk_size < 1):
            raise ValueError(f"temperature={temperature} and chunk_size={chunk_size} must be > 0")
        # On a GPU a look would wait for the device: there a foreign target's logprob is -inf.
        if targets.device.type == "cpu" and targets.numel():
            low, high = int(targets.min()), int(targets.max())
            if low < 0 or high >= vocab_size:
                raise ValueError(f"targets must lie in [0, {vocab_size}), found {low}..{high}")
        columns = min(max(vocab_size - tp_rank * width, 0), width)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        chunk = chunk_size or max(1, CHUNK_BYTES // (max(columns, 1) * wide.itemsize))
        return _Call(
            tp_group, tp_size, tp_rank * width, columns, wide, temperature, with_entropy, chunk
        )

    def shaped(
        self, outputs: tuple[Tensor, Tensor], shape: torch.Size
    ) -> tuple[Tensor, Tensor | None]:
        """Give the flat outputs the targets' shape."""
        logprobs, entropy = outputs
        return logprobs.view(shape), entropy.view(shape) if self.with_entropy else None

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """Row ranges, none of them empty."""
        for start in range(0, num_rows, self.chunk_size):
            yield slice(start, min(start + self.chunk_size, num_rows))

    def buffer(self, source: Tensor) -> Tensor:
        """Room for one chunk's scores, used by all in turn: fresh pages cost too much."""
        rows = min(self.chunk_size, source.shape[0])
        return source.new_empty(rows * self.columns, dtype=self.dtype)

    def view(self, buffer: Tensor, rows: slice) -> Tensor:
        """[chunk, columns] of a buffer."""
        size = rows.stop - rows.start
        return buffer[: size * self.columns].view(size, self.columns)

    def scores(self, source: Tensor, weight: Tensor | None, rows: slice, buffer: Tensor) -> Tensor:
        """logits / temperature of some rows, [chunk, columns], in the buffer, to be overwritten."""
        z = self.view(buffer, rows)
        if weight is None:
            z.copy_(source[rows, : self.columns])
        elif weight.dtype == self.dtype:
            torch.mm(source[rows], weight[: self.columns].t(), out=z)
        else:
            z.copy_(source[rows] @ weight[: self.columns].t())
        return z if self.temperature == 1.0 else z.div_(self.temperature)

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Each target's column [chunk, 1], clamped to this rank's, and whether it is one."""
        column = targets[:, None] - self.first
        return column.clamp(0, self.columns - 1), (column >= 0) & (column < self.columns)


class _Logprobs(torch.autograd.Function):
    """source: logits (weight None) or hidden states."""

    @staticmethod
    def forward(ctx, source, weight, targets, call: _Call):  # type: ignore[no-untyped-def]
        with_entropy = call.with_entropy
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
        log_normalizer = maximum + log_total
        # Subtracted in this order, the result keeps its digits when all logits are large.
        logprobs = (picked - maximum) - log_total
        entropy = None
        if with_entropy:
            weighted = (scale * (gathered[:, 3] + shift * sums)).sum(0)
            entropy = log_total - weighted / total
        ctx.save_for_backward(source, weight, targets, log_normalizer, entropy)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[no-untyped-def]
        source, weight, targets, log_normalizer, entropy = ctx.saved_tensors
        call: _Call = ctx.call
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(log_normalizer)
        first = call.buffer(source)
        second = first if grad_entropy is None else call.buffer(source)
        sink = _Gradients(source, weight, call, ctx.needs_input_grad)
        for rows in call.chunks(source.shape[0]):
            z = call.scores(source, weight, rows, first)
            g = grad_logprobs[rows, None]
            z.sub_(log_normalizer[rows, None])
            if grad_entropy is None:
                grad = z.exp_().mul_(-g)
            else:
                grad = torch.exp(z, out=call.view(second, rows))
                z.add_(entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(g)
                grad.mul_(z).neg_()
            if call.columns:
                column, inside = call.local(targets[rows])
                grad.scatter_add_(1, column, g * inside)
            sink.add(rows, grad if call.temperature == 1.0 else grad.div_(call.temperature))
        grad_source, grad_weight = sink.result()
        return grad_source, grad_weight, None, None


def _statistics(source: Tensor, weight: Tensor | None, targets: Tensor, call: _Call) -> Tensor:
    """This rank's m, s, z_t (-inf where it is another rank's) and, for the entropy, u."""
    num_rows = source.shape[0]
    statistics = source.new_zeros((4 if call.with_entropy else 3, num_rows), dtype=call.dtype)
    if call.columns == 0:
        # Finite, so that nothing becomes 0 * inf when ranks are combined; its weight is exp(-1e30).
        statistics[0] = -1e30
        statistics[2] = -math.inf
        return statistics
    first = call.buffer(source)
    second = call.buffer(source) if call.with_entropy else None
    for rows in call.chunks(num_rows):
        z = call.scores(source, weight, rows, first)
        column, inside = call.local(targets[rows])
        statistics[2, rows] = z.gather(1, column).masked_fill_(~inside, -math.inf)[:, 0]
        maximum = z.amax(1)
        statistics[0, rows] = maximum
        z.sub_(maximum[:, None])
        if second is None:
            statistics[1, rows] = z.exp_().sum(1)
        else:
            e = torch.exp(z, out=call.view(second, rows))
            statistics[1, rows] = e.sum(1)
            statistics[3, rows] = e.mul_(z).sum(1)
    return statistics


class _Gradients:
    """Collects the chunks' gradients with respect to the scores into those of the inputs."""

    def __init__(
        self, source: Tensor, weight: Tensor | None, call: _Call, needed: tuple[bool, ...]
    ) -> None:
        self.source, self.weight, self.columns = source, weight, call.columns
        self.grad_source = torch.empty_like(source) if needed[0] else None
        self.grad_weight: Tensor | None = None
        if weight is not None and needed[1]:
            self.grad_weight = weight.new_empty(weight.shape, dtype=call.dtype)
            self.grad_weight[call.columns if source.shape[0] else 0 :].zero_()
        if weight is None and self.grad_source is not None:
            self.grad_source[:, call.columns :].zero_()

    def add(self, rows: slice, grad: Tensor) -> None:
        """grad: [chunk, columns], with respect to the logits."""
        if self.weight is None:
            if self.grad_source is not None:
                self.grad_source[rows, : self.columns] = grad
            return
        grad = grad.to(self.weight.dtype)
        if self.grad_source is not None:
            torch.mm(grad, self.weight[: self.columns], out=self.grad_source[rows])
        if self.grad_weight is not None:
            into = self.grad_weight[: self.columns]
            if into.dtype == grad.dtype:
                into.addmm_(grad.t(), self.source[rows], beta=float(rows.start > 0))
            elif rows.start == 0:
                into.copy_(grad.t() @ self.source[rows])
            else:
                into.add_(grad.t() @ self.source[rows])

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of source and weight, in their dtypes."""
        if self.grad_weight is None:
            return self.grad_source, None
        assert self.weight is not None
        return self.grad_source, self.grad_weight.to(self.weight.dtype)

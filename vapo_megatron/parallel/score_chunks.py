"""Scores z = logits / temperature, a chunk of rows at a time, for logprobs.py.

From hidden states, the scores of one chunk of rows [chunk, V/tp] are computed, processed and
overwritten by the next chunk's. Processing goes by tiles, a few rows of the chunk, which fit in a
CPU's cache. Memory beside inputs and results, in rows of [., V/tp]:

    weight in the arithmetic's dtype     chunk + tile <= chunk_size;  without entropy chunk alone
    a narrower weight on a GPU           the same; backward also a chunk of the weight's dtype
    a narrower weight on a CPU           chunk of the weight's dtype, 1 or 2 tiles of the wider one
    logits as inputs                     1 or 2 tiles

A tile has at most chunk_size / 8 rows, and at least one.

A GPU multiplies a bfloat16 weight into float32 scores, and adds products into a float32 gradient,
as it accumulates in float32 anyway; torch's out_dtype, which a CPU lacks. There the scores are
rounded to the weight's dtype, as a linear layer's output is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

CPU_CHUNK_BYTES = 192 * 2**20
"""Size in float32 of [chunk_size, V/tp] where no chunk_size is given."""

GPU_CHUNK_BYTES = 2**30
"""The same on a GPU: 1,765 rows of a vocabulary of 152,064. Each chunk reads and writes the float32
gradient of the weight; with 331 rows that took a 0.5B model longer than multiplying did."""

GPU_CHUNK_ROWS = 4096
"""Most rows of a chunk on a GPU: beyond them a chunk costs memory and saves nothing."""

TILE_BYTES = 8 * 2**20
"""Largest tile on a CPU, unless a single row is larger."""

SLAB_BYTES = 32 * 2**20
"""Largest part of a weight gradient in the narrow dtype, before a CPU adds it up in float32."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The settings of one call."""

    tp_group: dist.ProcessGroup | None
    tp_size: int
    first: int
    """Global index of this rank's first column."""
    columns: int
    """This rank's columns that belong to the vocabulary; 0 on a rank that holds padding alone."""
    dtype: torch.dtype
    """Of the arithmetic."""
    product_dtype: torch.dtype
    """Of hidden @ weight.T."""
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
    ) -> Call:
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
        # Not on a GPU, where reading would synchronize: a target out of range gets -inf there.
        on_cpu = targets.device.type == "cpu"
        if on_cpu and targets.numel():
            low, high = int(targets.min()), int(targets.max())
            if low < 0 or high >= vocab_size:
                raise ValueError(f"targets must lie in [0, {vocab_size}), found {low}..{high}")
        columns = min(max(vocab_size - tp_rank * width, 0), width)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return Call(
            tp_group, tp_size, tp_rank * width, columns, wide,
            product_dtype=dtype if on_cpu else wide,
            temperature=temperature,
            with_entropy=with_entropy,
            chunk_size=chunk_size or default_chunk_size(max(columns, 1) * wide.itemsize, on_cpu),
        )  # fmt: skip

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Each target's column [rows, 1], clamped to this rank's, and whether it is one."""
        column = targets[:, None] - self.first
        return column.clamp(0, self.columns - 1), (column >= 0) & (column < self.columns)

    def sizes(self, num_rows: int, device: torch.device, shared: bool) -> tuple[int, int]:
        """Rows of a chunk and of a tile; shared: chunk_size covers both. num_rows > 0."""
        tile = max(1, self.chunk_size // 8)
        if device.type == "cpu":
            tile = min(tile, max(1, TILE_BYTES // (max(self.columns, 1) * self.dtype.itemsize)))
        chunk = max(1, self.chunk_size - tile) if shared else self.chunk_size
        chunk = -(-num_rows // -(-num_rows // chunk))  # equal sizes
        return chunk, min(tile, chunk)


def default_chunk_size(row_bytes: int, on_cpu: bool) -> int:
    """Return the rows of a chunk, at least one; row_bytes: of a row of scores, in float32."""
    if on_cpu:
        return max(1, CPU_CHUNK_BYTES // row_bytes)
    return max(1, min(GPU_CHUNK_BYTES // row_bytes, GPU_CHUNK_ROWS))


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b in out's dtype, which is the factors' or, on a GPU, float32."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def tiles(
    source: Tensor,
    weight: Tensor | None,
    call: Call,
    *,
    with_scratch: bool,
    gradients: Gradients | None = None,
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Iterate over the scores of all rows.

    Args:
        source: [T, V/tp] logits, or [T, H] hidden states where there is a weight.
        weight: [V/tp, H] or None.
        call: of the same call.
        with_scratch: also yield a scratch tile.
        gradients: collects what the caller leaves in z, the gradient with respect to the logits.

    Yields:
        (rows, z, scratch): rows of the source, at least one; their scores [tile, columns], which
        the caller may overwrite; scratch memory of the same size, or None.
    """
    if source.shape[0] == 0:
        return
    # Products that already have the scores' dtype need no second buffer.
    in_place = weight is not None and call.product_dtype == call.dtype
    num_chunk, num_tile = call.sizes(source.shape[0], source.device, in_place and with_scratch)
    buffer = narrow = None
    if weight is not None:
        buffer = narrow = source.new_empty((num_chunk, call.columns), dtype=call.product_dtype)
        if gradients is not None and buffer.dtype != weight.dtype:
            # The matmul of the gradients wants the weight's dtype.
            narrow = source.new_empty(buffer.shape)
    extra = [
        source.new_empty((num_tile, call.columns), dtype=call.dtype)
        for _ in range((not in_place) + with_scratch)
    ]

    # Chunks are one matmul each; tiles bound the float32 copies of a chunk.
    for start in range(0, source.shape[0], num_chunk):
        chunk = source[start : start + num_chunk]
        if weight is None or buffer is None:
            scores = chunk[:, : call.columns]
        else:
            scores = buffer[: len(chunk)]
            _multiply(chunk, weight[: call.columns].t(), scores)
        for low in range(0, len(chunk), num_tile):
            tile = scores[low : low + num_tile]
            rows = slice(start + low, start + low + len(tile))
            z = tile if in_place else extra[0][: len(tile)].copy_(tile)
            if call.temperature != 1.0:
                z.div_(call.temperature)
            yield rows, z, extra[-1][: len(tile)] if with_scratch else None
            if gradients is None:
                continue
            if narrow is None:
                gradients.add_logits(rows, z)
            elif not in_place or narrow is not buffer:
                narrow[low : low + len(tile)].copy_(z)
        if gradients is not None and narrow is not None:
            gradients.add_linear(slice(start, start + len(chunk)), narrow[: len(chunk)])


class Gradients:
    """Turns gradients with respect to the logits into those of the inputs."""

    def __init__(
        self, source: Tensor, weight: Tensor | None, call: Call, needed: tuple[bool, ...]
    ) -> None:
        self.source, self.weight, self.columns = source, weight, call.columns
        self.accumulates = call.product_dtype == call.dtype
        self.grad_source = torch.empty_like(source) if needed[0] else None
        self.grad_weight: Tensor | None = None
        if weight is not None and needed[1]:
            self.grad_weight = weight.new_empty(weight.shape, dtype=call.dtype)
            self.grad_weight[call.columns if source.shape[0] else 0 :].zero_()
        if weight is None and self.grad_source is not None:
            self.grad_source[:, call.columns :].zero_()

    def add_logits(self, rows: slice, grad: Tensor) -> None:
        """Where the source is the logits; grad: [tile, columns]."""
        if self.grad_source is not None:
            self.grad_source[rows, : self.columns] = grad

    def add_linear(self, rows: slice, grad: Tensor) -> None:
        """Where the source is hidden states; grad: [chunk, columns], in the weight's dtype."""
        assert self.weight is not None
        if self.grad_source is not None:
            torch.mm(grad, self.weight[: self.columns], out=self.grad_source[rows])
        if self.grad_weight is None:
            return
        into = self.grad_weight[: self.columns]
        if into.dtype == grad.dtype:
            into.addmm_(grad.t(), self.source[rows], beta=float(rows.start > 0))
            return
        if self.accumulates:
            beta = float(rows.start > 0)
            torch.addmm(
                into, grad.t(), self.source[rows], beta=beta, out_dtype=into.dtype, out=into
            )
            return
        slab = max(1, SLAB_BYTES // (into.shape[1] * grad.itemsize))
        for low in range(0, self.columns, slab):
            part = grad[:, low : low + slab].t() @ self.source[rows]
            if rows.start == 0:
                into[low : low + slab] = part
            else:
                into[low : low + slab] += part

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of source and weight, in their dtypes."""
        grad_weight = self.grad_weight
        return self.grad_source, None if grad_weight is None else grad_weight.to(self.source.dtype)

"""y_t = x_t + decay * y_{t+1} within each segment of a packed tensor, without a loop over tokens.

Tokens are split into rows of ROW. Within a row that lies in one segment, the recurrence is a
cumulative sum weighted by powers of the decay; a row with a segment's end is scanned with one decay
per token; a short scan over the row totals then carries y from row to row. The number of kernels is
O(log T).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ROW = 32
# 1 / SMALLEST_DECAY**ROW must stay within float64.
SMALLEST_DECAY = 2.0**-30
CPU_SLICE_TOKENS = 65536


def cache_slices(length: int, device: torch.device, unit: int = 1) -> Iterator[slice]:
    """Split 0 .. length - 1 into slices that fit a CPU core's cache; one slice on a GPU.

    Args:
        length: number of entries.
        device: where they are processed.
        unit: tokens per entry.
    """
    step = CPU_SLICE_TOKENS // unit if device.type == "cpu" else length
    return (slice(lo, min(lo + step, length)) for lo in range(0, length, step))


def scan_buffer(num_tokens: int, device: torch.device) -> Tensor:
    """Allocate reverse_scan_'s buffer for T tokens; the caller fills the first T entries.

    Args:
        num_tokens: T.
        device: of the buffer.

    Returns:
        float64 [T rounded up to whole rows, + 1]; the first T entries are unset, the rest 0.
    """
    num_rows = -(-num_tokens // ROW)
    buffer = torch.empty(num_rows * ROW + 1, dtype=torch.float64, device=device)
    buffer[num_tokens:] = 0
    return buffer


def reverse_scan_(buffer: Tensor, cu_seqlens: Tensor, decay: float | Tensor) -> None:
    """Replace each token's x by the discounted sum from there to the end of its segment.

        y_t = x_t + decay_b * y_{t+1},   y = 0 after the last token of segment b

    Exact up to float64 rounding for every decay in [0, 1]; a nonzero decay below 2**-30 may be
    treated as 0, an error of at most 1e-9 of max|x|. Nothing overflows, and segments never mix.

    Args:
        buffer: from scan_buffer, its first T entries set to x (finite); overwritten with y.
        cu_seqlens: integer [B+1], on the same device, from 0 to T >= 1; segments may be empty.
        decay: in [0, 1]; a float, or float64 [B], one per segment.
    """
    ends = cu_seqlens.long()[1:]
    num_rows = buffer.numel() // ROW
    rows, shifted = buffer[:-1].view(num_rows, ROW), buffer[1:].view(num_rows, ROW)
    weights = _RowWeights(decay, ends, num_rows)

    # A leading empty segment selects row 0, in which no segment may end; this scan suits any row.
    broken = (ends - 1).clamp(min=0) // ROW
    inner, inner_decay = _scan_broken_rows(rows[broken], broken, ends, weights.per_segment)
    totals = torch.empty_like(rows[:, 0])
    for part in cache_slices(num_rows, buffer.device, ROW):
        torch.sum(shifted[part] * weights.inward(part), dim=1, out=totals[part])
    totals += rows[:, 0]
    totals[broken] = inner[:, 0]
    row_decay = weights.across_row.clone()
    row_decay[broken] = inner_decay[:, 0]

    # roll wraps row 0 around to the last row, where a segment ends: it is multiplied by 0.
    following = _scan(totals.flip(0), row_decay.flip(0)).flip(0).roll(-1)
    carried = weights.across_row * following
    for part in cache_slices(num_rows, buffer.device, ROW):
        later = shifted[part] * weights.inward(part)
        later[:, -1] = carried[part]
        rows[part].addcmul_(later.flip(1).cumsum_(1).flip(1), weights.outward(part))
    rows[broken] = inner + inner_decay * following[broken].unsqueeze(1)


class _RowWeights:
    """Powers of the decay for rows within one segment.

        y_k = x_k + outward_k * sum_{j>=k} inward_j * x_{j+1}

    inward_j = decay^(j+1), but 0 in the last column, whose x_{j+1} belongs to the next row;
    outward_k = decay^-k, with the decay clamped to SMALLEST_DECAY against overflow.
    """

    def __init__(self, decay: float | Tensor, ends: Tensor, num_rows: int) -> None:
        power = torch.arange(ROW, dtype=torch.float64, device=ends.device)
        if isinstance(decay, Tensor):
            self.per_segment = decay
            starts = torch.arange(num_rows, device=ends.device) * ROW
            self._segment: Tensor | None = torch.bucketize(starts, ends, right=True)
            base = decay
        else:
            self.per_segment = power.new_full(ends.shape, decay)
            self._segment = None
            base = power.new_full((1,), decay)
        self._inward = base.unsqueeze(1) ** (power + 1)
        self._inward[:, -1] = 0
        self._outward = base.clamp(min=SMALLEST_DECAY).unsqueeze(1) ** -power
        across = base**ROW
        self.across_row = (
            across.expand(num_rows) if self._segment is None else across[self._segment]
        )

    def inward(self, part: slice) -> Tensor:
        return self._of_rows(self._inward, part)

    def outward(self, part: slice) -> Tensor:
        return self._of_rows(self._outward, part)

    def _of_rows(self, table: Tensor, part: slice) -> Tensor:
        return table if self._segment is None else table.index_select(0, self._segment[part])


def _scan_broken_rows(
    x: Tensor, rows: Tensor, ends: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """Scan rows in which a segment ends, as if each were the last.

    Returns:
        (y, factor of the next row's y), both [R, ROW].
    """
    token = rows.unsqueeze(1) * ROW + torch.arange(ROW, device=rows.device)
    # Columns beyond the last token belong to no segment; they are never read.
    segment = torch.bucketize(token, ends, right=True).clamp(max=ends.numel() - 1)
    decay = (decay[segment] * (token + 1 != ends[segment])).flip(1)
    return _scan(x.flip(1), decay).flip(1), decay.cumprod(1).flip(1)


def _scan(x: Tensor, decay: Tensor) -> Tensor:
    """y_u = x_u + decay_u * y_{u-1} along the last dim: combine pairs, scan them, expand."""
    length = x.shape[-1]
    if length == 1:
        return x
    paired = length // 2 * 2
    first, second = x[..., 0:paired:2], x[..., 1::2]
    y = torch.empty_like(x)
    y[..., 0] = x[..., 0]
    y[..., 1::2] = _scan(
        torch.addcmul(second, decay[..., 1::2], first), decay[..., 1::2] * decay[..., 0:paired:2]
    )
    y[..., 2::2] = torch.addcmul(x[..., 2::2], decay[..., 2::2], y[..., 1 : length - 1 : 2])
    return y

"""How a Megatron parameter is made of its HF tensors: pure functions on tensors.

A tensor-parallel rank's shard consists of one part of each HF tensor: `part_bounds` says which rows
or columns, and `merge` puts them together locally, so a rank reads from disk only what it keeps.
`join` is the inverse, from the shards of all ranks.

    kind         HF tensors         Megatron shard
    vocabulary   [V, H]             rows of the vocabulary padded with zero rows
    qkv          q, k, v            per key-value head: its query heads, key head, value head
    gate_up      gate, up           this rank's gate rows, then its up rows
    row          [out, in]          columns
    replicated   any                the same on every rank

A qkv shard is a plain tp_size-th of the interleaved rows. With fewer key-value heads than ranks it
is a piece of one key-value head's rows, which often holds no key or no value at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["vocabulary", "qkv", "gate_up", "row", "replicated"]


class RowRun(NamedTuple):
    """Rows that are consecutive both in a Megatron tensor and in one of its HF tensors."""

    start: int
    """First row in the full Megatron tensor."""
    tensor: int
    """Index of the HF tensor, in the table's order."""
    first: int
    """First row in the HF tensor."""
    num_rows: int


def row_runs(kind: Kind, sizes: Sequence[int], *, num_groups: int) -> list[RowRun]:
    """Map the rows of a full Megatron tensor to its HF tensors; padding is left out.

    Args:
        kind: see the module's docstring.
        sizes: rows of the full HF tensors.
        num_groups: key-value heads of the model; used for qkv alone.

    Returns:
        In the Megatron tensor's order; together they cover its first sum(sizes) rows.
    """
    groups = num_groups if kind == "qkv" else 1
    runs: list[RowRun] = []
    start = 0
    for group in range(groups):
        for tensor, size in enumerate(sizes):
            count = size // groups
            runs.append(RowRun(start, tensor, group * count, count))
            start += count
    return runs


def shard_dim(kind: Kind) -> int | None:
    """Return the dimension along which tensor parallelism shards the HF tensors, or None."""
    return {"vocabulary": 0, "qkv": 0, "gate_up": 0, "row": 1, "replicated": None}[kind]


def bounds(size: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Return [start, stop) of a rank's part of `size` elements, which tp_size divides."""
    assert size % tp_size == 0, f"{size} is not a multiple of the tensor-parallel size {tp_size}"
    part = size // tp_size
    return tp_rank * part, (tp_rank + 1) * part


def part_bounds(
    kind: Kind,
    sizes: Sequence[int],
    tp_rank: int,
    tp_size: int,
    *,
    num_groups: int,
    padded_rows: int,
) -> list[tuple[int, int]]:
    """Return [start, stop) of a rank's part of each HF tensor along shard_dim(kind).

    Args:
        kind: see the module's docstring; not "replicated".
        sizes: of the full HF tensors along that dimension.
        tp_rank, tp_size: whose part.
        num_groups: key-value heads of the model.
        padded_rows: of a vocabulary with its padding, over all ranks. Padding is in no part.
    """
    if kind == "qkv":
        return _qkv_bounds(sizes, tp_rank, tp_size, num_groups)
    if kind == "vocabulary":
        start, stop = bounds(padded_rows, tp_rank, tp_size)
        return [(min(start, size), min(stop, size)) for size in sizes]
    return [bounds(size, tp_rank, tp_size) for size in sizes]


def _qkv_bounds(
    sizes: Sequence[int], tp_rank: int, tp_size: int, num_groups: int
) -> list[tuple[int, int]]:
    """Find a rank's chunk of the interleaved rows in the query, the key and the value."""

    def rows_before(row: int) -> list[int]:
        """Count the rows of each HF tensor before an interleaved row."""
        group, left = divmod(row, sum(sizes) // num_groups)
        counts = []
        for size in sizes:
            in_group = size // num_groups
            taken = min(left, in_group)
            counts.append(group * in_group + taken)
            left -= taken
        return counts

    start, stop = bounds(sum(sizes), tp_rank, tp_size)
    return list(zip(rows_before(start), rows_before(stop), strict=True))


def merge_qkv(query: Tensor, key: Tensor, value: Tensor, *, num_groups: int) -> Tensor:
    """Interleave projections by key-value group.

    Args:
        query, key, value: [rows, ...] of weights, [rows] of biases.
        num_groups: key-value heads among these rows; 1 for a piece of one, where some are empty.
    """
    parts = [x.unflatten(0, (num_groups, len(x) // num_groups)) for x in (query, key, value)]
    return torch.cat(parts, 1).flatten(0, 1)


def split_qkv(qkv: Tensor, *, num_groups: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Undo merge_qkv; returns (query, key, value), each contiguous."""
    grouped = qkv.reshape(num_groups, -1, *qkv.shape[1:])
    sizes = [grouped.shape[1] - 2 * head_dim, head_dim, head_dim]
    query, key, value = (x.reshape(-1, *qkv.shape[1:]) for x in grouped.split(sizes, 1))
    return query, key, value


def pad_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """Append zero rows up to num_rows."""
    missing = num_rows - tensor.shape[0]
    assert missing >= 0, f"{tensor.shape[0]} rows do not fit into {num_rows}"
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def merge(
    kind: Kind, parts: Sequence[Tensor], *, num_groups: int, tp_size: int, num_rows: int
) -> Tensor:
    """Build one rank's Megatron shard from its parts of the HF tensors.

    Args:
        kind: see the module's docstring.
        parts: as part_bounds cuts them, in the table's order.
        num_groups: key-value heads of the model.
        tp_size: number of ranks.
        num_rows: rows of the shard, for the padding of a vocabulary.
    """
    if kind == "qkv":
        query, key, value = parts
        return merge_qkv(query, key, value, num_groups=max(1, num_groups // tp_size))
    if kind == "gate_up":
        return torch.cat(list(parts))
    (part,) = parts
    return pad_rows(part, num_rows) if kind == "vocabulary" else part


def join(
    kind: Kind,
    shards: Sequence[Tensor],
    *,
    num_groups: int,
    head_dim: int,
    num_rows: int | None = None,
) -> tuple[Tensor, ...]:
    """Build the full HF tensors from the shards of all tensor-parallel ranks, in rank order.

    Args:
        kind: see the module's docstring.
        shards: one for each rank.
        num_groups: key-value heads of the model.
        head_dim: rows of one head.
        num_rows: vocabulary size without padding; needed for a vocabulary.

    Returns:
        Tensors in the table's order; they share memory with the shards where no copy is needed.
    """
    if kind == "gate_up":
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return _concatenate(gates, 0), _concatenate(ups, 0)
    dim = shard_dim(kind)
    full = shards[0] if dim is None else _concatenate(shards, dim)
    if kind == "qkv":
        return split_qkv(full, num_groups=num_groups, head_dim=head_dim)
    return (full[:num_rows],) if kind == "vocabulary" else (full,)


def _concatenate(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)

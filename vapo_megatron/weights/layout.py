"""How a Megatron parameter is made of its HF tensors: pure functions on tensors.

A tensor-parallel rank's shard consists of one part of each HF tensor: holders.part_bounds says
which rows or columns, and `merge` puts them together locally, so a rank reads from disk only what
it keeps. `join` is the inverse, from the shards of all ranks.

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
from typing import NamedTuple

import torch
from torch import Tensor

from vapo_megatron.weights.holders import shard_dim
from vapo_megatron.weights.table import Kind


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

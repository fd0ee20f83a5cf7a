"""How one Megatron parameter is laid out against its HF tensors: pure functions on tensors.

A tensor-parallel rank's shard is made of the same rank's parts of the HF tensors: each HF tensor is
cut into tp_size equal parts along `shard_dim(kind)`, and `merge` puts one rank's parts together.
`split` is its inverse. Neither needs another rank, so a rank reads from disk only what it keeps.

    kind         HF tensors         Megatron shard
    vocabulary   [V, H]             rows of the vocabulary padded with zero rows
    qkv          q, k, v            per key-value head: its query heads, key head, value head
    gate_up      gate, up           this rank's gate rows, then its up rows
    row          [out, in]          columns
    replicated   any                the same on every rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["vocabulary", "qkv", "gate_up", "row", "replicated"]


def shard_dim(kind: Kind) -> int | None:
    """Return the dimension along which tensor parallelism cuts the HF tensors; None: not cut."""
    return {"vocabulary": 0, "qkv": 0, "gate_up": 0, "row": 1, "replicated": None}[kind]


def bounds(size: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Return [start, stop) of a rank's part of `size` elements, which tp_size divides."""
    assert size % tp_size == 0, f"{size} is not a multiple of the tensor-parallel size {tp_size}"
    part = size // tp_size
    return tp_rank * part, (tp_rank + 1) * part


def vocabulary_bounds(
    vocab_size: int, padded_rows: int, tp_rank: int, tp_size: int
) -> tuple[int, int]:
    """Return [start, stop) of a rank's rows that exist in the HF tensor; empty for padding alone.

    padded_rows: rows of the vocabulary with padding, over all ranks.
    """
    start, stop = bounds(padded_rows, tp_rank, tp_size)
    return min(start, vocab_size), min(stop, vocab_size)


def merge_qkv(query: Tensor, key: Tensor, value: Tensor, *, num_groups: int) -> Tensor:
    """Interleave projections by key-value group.

    Args:
        query, key, value: [rows, ...] of weights, [rows] of biases.
        num_groups: key-value heads among these rows.
    """
    parts = [x.reshape(num_groups, -1, *x.shape[1:]) for x in (query, key, value)]
    return torch.cat(parts, 1).reshape(-1, *query.shape[1:])


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


def merge(kind: Kind, parts: Sequence[Tensor], *, num_groups: int, num_rows: int) -> Tensor:
    """Build one rank's Megatron shard from its parts of the HF tensors.

    Args:
        kind: see the module's docstring.
        parts: in the table's order; the parts of a vocabulary without its padding.
        num_groups: key-value heads of this rank.
        num_rows: rows of the shard, for the padding of a vocabulary.
    """
    if kind == "qkv":
        query, key, value = parts
        return merge_qkv(query, key, value, num_groups=num_groups)
    if kind == "gate_up":
        return torch.cat(list(parts))
    (part,) = parts
    return pad_rows(part, num_rows) if kind == "vocabulary" else part


def split(kind: Kind, shard: Tensor, *, num_groups: int, head_dim: int) -> tuple[Tensor, ...]:
    """Take one rank's shard apart into its parts of the HF tensors; vocabularies keep padding."""
    if kind == "qkv":
        return split_qkv(shard, num_groups=num_groups, head_dim=head_dim)
    if kind == "gate_up":
        return tuple(shard.chunk(2))
    return (shard,)


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
        num_groups: key-value heads of one rank.
        head_dim: rows of one head.
        num_rows: vocabulary size without padding; needed for a vocabulary.

    Returns:
        Tensors in the table's order. They share memory with the shards where nothing had to move.
    """
    dim = shard_dim(kind)
    split_shards = [split(kind, s, num_groups=num_groups, head_dim=head_dim) for s in shards]
    if dim is None or len(shards) == 1:
        full = split_shards[0]
    else:
        full = tuple(torch.cat(parts, dim) for parts in zip(*split_shards, strict=True))
    return tuple(t[:num_rows] for t in full) if kind == "vocabulary" else full

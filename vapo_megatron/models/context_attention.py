"""Causal attention over packed sequences that context-parallel ranks share, without TE.

Before: every rank holds query, key and value of its own tokens (data/context_parallel.py). It
gathers one layer's keys and values, attends from its own queries part by part, and frees what it
gathered. Backward gathers them again, recomputes each part, and reduce-scatters the gradients of
keys and values. Beside its own tokens a rank holds at most one layer's keys and values, their
gradients, and one part's scores.

On a GPU in bfloat16 there are two parts, all early and all late chunks, for torch's varlen
attention. Otherwise a part is a block of queries with the keys that some of them see, and a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from vapo_megatron.data.context_parallel import places_of_tokens, ranks_order
from vapo_megatron.parallel.context import all_gather, reduce_scatter

MAX_PAIRS = 1 << 22
"""Pairs of a query and a key in one block, unless a single query has more: 21 MB of masks."""
_CALL_PAIRS = 125_000
"""Masked pairs that cost as much as another call, times channels; as in attention.py."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Index = slice | Tensor


class Part(NamedTuple):
    """Some of a rank's queries, with the keys that they see."""

    queries: Index
    """Rows of S'."""
    keys: Index
    """Rows of S; each at most once."""
    attend: Attend
    """(query, key, value) at these rows -> output at the queries."""


class Shard(NamedTuple):
    """A rank's part of a packed batch; see data/context_parallel.py."""

    rows: Tensor
    """int64 [S']: its tokens in S."""
    places: Tensor
    """int64 [S]: of each token in the ranks' order."""
    parts: list[Part]


class ContextShards:
    """The shard of each packed batch, computed once and shared by all layers of a model.

    Args:
        group: context-parallel ranks.
        scale: factor on the scores.
        varlen: use torch's varlen attention.
    """

    def __init__(self, group: ProcessGroup, scale: float, *, varlen: bool) -> None:
        self.group, self.scale, self.varlen = group, scale, varlen
        self._shards = WeakTensorKeyDictionary()

    def of(self, query: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Shard:
        """Return the shard of a batch: query [S', heads, d], cu_seqlens int32 from 0 to S."""
        shard = self._shards.get(cu_seqlens)
        if shard is None:
            shard = self._shards[cu_seqlens] = self._shard(query, cu_seqlens, max_seqlen)
        return shard

    def _shard(self, query: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Shard:
        cp_size, cp_rank = self.group.size(), self.group.rank()
        size = len(query) * cp_size
        order = ranks_order(cu_seqlens, size, cp_size)
        rows = order.chunk(cp_size)[cp_rank]
        if self.varlen:
            parts = _chunk_parts(cu_seqlens, size, max_seqlen, cp_size, cp_rank, self.scale)
        else:
            channels = query.size(1) * query.size(2)
            parts = _block_parts(cu_seqlens, rows, cp_size, cp_rank, channels, self.scale)
        return Shard(rows, places_of_tokens(order), parts)


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, shard: Shard, group: ProcessGroup
) -> Tensor:
    """Causal attention within each packed sequence, over its tokens on all ranks. Collective.

    Args:
        query: [S', heads, d]. key, value: [S', groups, d]; rotated by each token's position.
        shard, group: from ContextShards.

    Returns:
        [S', heads, d]
    """
    return _Attention.apply(query, key, value, shard, group)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, shard: Shard, group: ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.shard, ctx.group = shard, group
        keys, values = _gather_in_order(key, value, shard, group)
        output = torch.empty_like(query)
        for queries, seen, attend in shard.parts:
            output[queries] = attend(query[queries], keys[seen], values[seen])
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        shard: Shard = ctx.shard
        keys, values = _gather_in_order(key, value, shard, ctx.group)
        grad_query = torch.empty_like(query)
        # Several parts add to a key's gradient, and so do the ranks: in float32 at least.
        wide = torch.promote_types(key.dtype, torch.float32)
        both = keys.new_zeros((len(keys), 2, *keys.shape[1:]), dtype=wide)
        for queries, seen, attend in shard.parts:
            q, k, v = (
                x.detach().requires_grad_() for x in (query[queries], keys[seen], values[seen])
            )
            with torch.enable_grad():
                output = attend(q, k, v)
            of_query, of_keys, of_values = torch.autograd.grad(output, (q, k, v), grad[queries])
            grad_query[queries] = of_query
            both[seen] += torch.stack((of_keys, of_values), 1)
        in_ranks_order = torch.empty_like(both).index_copy_(0, shard.places, both)
        own = reduce_scatter(in_ranks_order, ctx.group).to(key.dtype)
        return grad_query, own[:, 0], own[:, 1], None, None


def _gather_in_order(
    key: Tensor, value: Tensor, shard: Shard, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Gather [S', groups, d] twice -> [S, groups, d] twice, in the order of the packed batch."""
    both = all_gather(torch.stack((key, value), 1), group).index_select(0, shard.places)
    return both[:, 0], both[:, 1]


def _block_parts(
    cu_seqlens: Tensor, rows: Tensor, cp_size: int, cp_rank: int, channels: int, scale: float
) -> list[Part]:
    """Blocks of queries: a long chunk in several, short ones together where that masks little."""
    bounds = cu_seqlens.tolist()
    first_keys = cu_seqlens[torch.searchsorted(cu_seqlens[1:], rows.int(), right=True)]
    blocks: list[tuple[int, int, int, int]] = []
    for start, stop in zip(bounds[:-1], bounds[1:]):
        chunk = (stop - start) // (2 * cp_size)
        own = start // cp_size
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
            seen = start + number * chunk
            blocks += _blocks_of_chunk(own, seen, chunk, start)
            own += chunk
    parts = []
    for own, own_stop, key, key_stop in _joined(blocks, channels):
        first, last = first_keys[own:own_stop, None], rows[own:own_stop, None]
        attend = partial(_masked, first, last, range(key, key_stop), scale)
        parts.append(Part(slice(own, own_stop), slice(key, key_stop), attend))
    return parts


def _blocks_of_chunk(
    own: int, seen: int, chunk: int, start: int
) -> list[tuple[int, int, int, int]]:
    """(query, end, key, end): rows of S' and of S; a chunk's queries see from `start` on."""
    blocks, done = [], 0
    while done < chunk:
        # As many rows as have few enough pairs: n (seen + done + n - start) <= MAX_PAIRS.
        before = seen + done - start
        rows = int(((before * before + 4 * MAX_PAIRS) ** 0.5 - before) / 2)
        rows = max(1, min(chunk - done, rows))
        blocks.append((own + done, own + done + rows, start, seen + done + rows))
        done += rows
    return blocks


def _joined(
    blocks: list[tuple[int, int, int, int]], channels: int
) -> list[tuple[int, int, int, int]]:
    joined: list[tuple[int, int, int, int]] = []
    for block in blocks:
        if joined:
            last = joined[-1]
            both = (last[0], block[1], last[2], max(last[3], block[3]))
            masked = _pairs(both) - _pairs(last) - _pairs(block)
            if _pairs(both) <= MAX_PAIRS and masked * channels < _CALL_PAIRS:
                joined[-1] = both
                continue
        joined.append(block)
    return joined


def _pairs(block: tuple[int, int, int, int]) -> int:
    return (block[1] - block[0]) * (block[3] - block[2])


def _masked(
    first: Tensor,
    last: Tensor,
    keys: range,
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """Attend from each query [n, heads, d] to the keys from first to last, int [n, 1] each."""
    seen = torch.arange(keys.start, keys.stop, device=query.device)
    mask = (first <= seen) & (seen <= last)
    if query.is_cuda and query.size(1) != key.size(1):
        # The float32 kernel has no grouped heads: torch would use one with all scores.
        key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.size(1) != k.size(1)
    )
    return output[0].transpose(0, 1)


def _chunk_parts(
    cu_seqlens: Tensor, size: int, max_seqlen: int, cp_size: int, cp_rank: int, scale: float
) -> list[Part]:
    """Two parts: every sequence's early chunk, and every sequence's late one.

    Nothing is read back from the device: sizes follow from S, as a sequence's chunks are equal.
    """
    bounds, chunks = cu_seqlens.long(), 2 * cp_size
    cu_q = bounds // chunks
    of_query = torch.arange(size // chunks, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_q[1:], of_query, right=True)
    early = of_query + cu_q[sequence]
    parts = []
    for number, own in ((cp_rank, early), (chunks - 1 - cp_rank, early + cu_q.diff()[sequence])):
        cu_k = cu_q * (number + 1)
        of_key = torch.arange(size // chunks * (number + 1), device=cu_seqlens.device)
        sequence_of_key = torch.searchsorted(cu_k[1:], of_key, right=True)
        seen = of_key + (bounds - cu_k)[sequence_of_key]
        longest = max_seqlen // chunks
        attend = partial(
            varlen_attention,
            cu_q=cu_q.int(),
            cu_k=cu_k.int(),
            max_q=longest,
            max_k=longest * (number + 1),
            scale=scale,
        )
        parts.append(Part(own, seen, attend))
    return parts


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
) -> Tensor:
    """Call torch's varlen attention, causal: the last query of a sequence sees its last key."""
    from torch.nn.attention import varlen

    attend: Any = varlen.varlen_attn
    return attend(
        query, key, value, cu_q, cu_k, max_q, max_k,
        scale=scale, window_size=(-1, 0), enable_gqa=query.size(1) != key.size(1),
    )  # fmt: skip

"""Causal attention over packed sequences, where Transformer Engine's is not installed.

On a GPU in bfloat16: torch's varlen attention (flash attention over cu_seqlens), without a device
synchronization. Otherwise, on a CPU or in float32, which flash attention does not support:
scaled_dot_product_attention, on long sequences one by one, on those of similar length in
right-padded batches. That is exact, since causal rows never attend to their right. It reads the
bounds back from the device once for each batch.
"""

from __future__ import annotations

import vapo_megatron.parallel  # noqa: F401  prepares megatron-core for this machine

# isort: split
import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from vapo_megatron.errors import ConfigError
from vapo_megatron.models.context_attention import (
    ContextShards,
    context_attention,
    varlen_attention,
)
from vapo_megatron.models.rope import Rotary
from vapo_megatron.parallel import backend


def uses_flash_attention(dtype: torch.dtype) -> bool:
    """Does PackedAttention use torch's varlen attention: on a GPU, unless in float32?"""
    return backend.device().type == "cuda" and dtype != torch.float32


def check_flash_attention(head_dim: int) -> None:
    """Refuse a head size that torch's varlen attention does not support.

    Raises:
        ConfigError: names the field, its value and what else can be done.
    """
    if head_dim % 8 or head_dim > 256:
        raise ConfigError(
            f"model.hf_path's head_dim={head_dim} must be a multiple of 8 and at most 256 for "
            "torch's flash attention in bfloat16; set model.dtype=float32, or "
            "model.layer_spec=transformer_engine"
        )


class PackedAttention(MegatronModule):
    """Rotary embedding and core attention of megatron-core's local layer spec; no parameters.

    Called with query [S', heads, d], key and value [S', groups, d] of this rank and
    `packed_seq_params` whose cu_seqlens_q bound the sequences in S, those of all context-parallel
    ranks together; returns [S', heads * d]. The rotation is done here and not by megatron-core,
    which loops over the sequences and recomputes every cosine for the query and the key of each
    layer.

    Args:
        rotary, shards: of the model that the layer belongs to; shards is None without context
            parallelism, where S' = S.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        *,
        rotary: Rotary,
        shards: ContextShards | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.rotary, self.shards = rotary, shards
        self.flash = uses_flash_attention(config.params_dtype)
        assert attn_mask_type == AttnMaskType.causal, attn_mask_type
        assert config.attention_dropout == 0
        assert (config.context_parallel_size > 1) == (shards is not None)
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """Attend; see the class."""
        assert attention_bias is None and packed_seq_params is not None, "packed sequences only"
        cu_seqlens = packed_seq_params.cu_seqlens_q
        max_seqlen = packed_seq_params.max_seqlen_q
        if self.shards is not None:
            shard = self.shards.of(query, cu_seqlens, max_seqlen)
            query, key = self.rotary(query, key, cu_seqlens, shard.rows)
            output = context_attention(query, key, value, shard, self.shards.group)
            return output.reshape(output.size(0), -1)
        query, key = self.rotary(query, key, cu_seqlens)
        if self.flash:
            output = varlen_attention(
                query,
                key,
                value,
                cu_q=cu_seqlens,
                cu_k=cu_seqlens,
                max_q=max_seqlen,
                max_k=max_seqlen,
                scale=self.scale,
            )
        else:
            output = packed_attention(query, key, value, cu_seqlens, self.scale)
        return output.reshape(output.size(0), -1)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float
) -> Tensor:
    """Causal attention within each packed sequence, by scaled_dot_product_attention.

    Args:
        query: [S, heads, d]. key, value: [S, groups, d].
        cu_seqlens: int32 [sequences + 1]; empty sequences are allowed.
        scale: factor on the scores.

    Returns:
        [S, heads, d]
    """
    bounds = _host_bounds(cu_seqlens)
    size, heads, channels = query.shape
    assert bounds[-1] == size, f"cu_seqlens end at {bounds[-1]}, but there are {size} tokens"
    if size == 0:
        return query
    plan = _plan(bounds, heads * channels, query.device)
    if query.is_cuda and heads != key.size(1):
        # The float32 kernel has no grouped heads: torch would fall back to one with all scores.
        key, value = (x.repeat_interleave(heads // x.size(1), dim=1) for x in (key, value))
    outputs = []
    padded = (_Pad.apply(x, plan).split(plan.splits) for x in (query, key, value))
    for batch, *parts in zip(plan.batches, *padded):
        q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in parts)
        output = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=heads != key.size(1)
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return _Unpad.apply(torch.cat(outputs), plan)


_bounds = WeakTensorKeyDictionary()


def _host_bounds(cu_seqlens: Tensor) -> tuple[int, ...]:
    """Read the bounds; from a GPU once for all layers, because reading synchronizes."""
    bounds = _bounds.get(cu_seqlens)
    if bounds is None:
        bounds = _bounds[cu_seqlens] = tuple(cu_seqlens.tolist())
    return bounds


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Packed tokens laid out as right-padded batches of cells, one call for each batch."""

    batches: list[int]
    """Sequences of each batch."""
    splits: list[int]
    """Cells of each batch: its sequences times the longest one's length."""
    cell_of_token: Tensor
    """int64 [S]"""
    token_of_cell: Tensor
    """int64 [cells]; any token where the cell is padding."""
    padding: Tensor
    """int64: the cells that are padding."""


class _Pad(torch.autograd.Function):
    """Tokens to cells; padding cells are 0, so that they cannot turn into NaN."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, plan: _Plan) -> Tensor:
        ctx.plan = plan
        cells = tokens.index_select(0, plan.token_of_cell)
        return cells.index_fill_(0, plan.padding, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.plan.cell_of_token), None


class _Unpad(torch.autograd.Function):
    """Cells to tokens: the inverse of _Pad."""

    @staticmethod
    def forward(ctx: Any, cells: Tensor, plan: _Plan) -> Tensor:
        ctx.plan = plan
        return cells.index_select(0, plan.cell_of_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        cells = grad.index_select(0, ctx.plan.token_of_cell)
        return cells.index_fill_(0, ctx.plan.padding, 0), None


# Unit: copying one channel of one token there and back; measured on one CPU core.
_CALL_COST = 5_000
_PAIR_COST = 0.04


@functools.lru_cache(maxsize=16)
def _plan(bounds: tuple[int, ...], channels: int, device: torch.device) -> _Plan:
    """Batch the sequences: one joins a longer one if its padding costs less than another call."""
    lengths = [stop - start for start, stop in zip(bounds[:-1], bounds[1:])]
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        width = lengths[groups[-1][0]] if groups else 0
        padding = width - lengths[i] + _PAIR_COST * (width**2 - lengths[i] ** 2)
        if lengths[i] and groups and channels * padding < _CALL_COST:
            groups[-1].append(i)
        elif lengths[i]:
            groups.append([i])
    splits = [len(group) * lengths[group[0]] for group in groups]
    cell_of_token = torch.empty(bounds[-1], dtype=torch.long)
    cell = 0
    for group in groups:
        for i in group:
            cell_of_token[bounds[i] : bounds[i + 1]] = torch.arange(cell, cell + lengths[i])
            cell += lengths[group[0]]
    token_of_cell = torch.zeros(cell, dtype=torch.long)
    token_of_cell[cell_of_token] = torch.arange(bounds[-1])
    is_padding = torch.ones(cell, dtype=torch.bool)
    is_padding[cell_of_token] = False
    return _Plan(
        batches=[len(group) for group in groups],
        splits=splits,
        cell_of_token=cell_of_token.to(device),
        token_of_cell=token_of_cell.to(device),
        padding=is_padding.nonzero().flatten().to(device),
    )

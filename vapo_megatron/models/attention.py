"""Causal attention over packed sequences, where Transformer Engine's is not installed.

On a GPU in bfloat16: torch's varlen attention (flash attention over cu_seqlens). Otherwise the
sequences are copied into right-padded batches, each a single call of scaled_dot_product_attention:
causal rows never see what stands to their right, so the padding changes nothing.
"""

from __future__ import annotations

import vapo_megatron.parallel  # noqa: F401  prepares megatron-core for this machine

# isort: split
import dataclasses
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class PackedAttention(MegatronModule):
    """Core attention of megatron-core's local layer spec. It has no parameters.

    Called with query [S, heads, d], key and value [S, groups, d] of this tensor-parallel rank and
    `packed_seq_params` whose cu_seqlens_q bound the sequences; returns [S, heads * d].
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal, attn_mask_type
        assert config.context_parallel_size == 1 and config.attention_dropout == 0
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
        if query.is_cuda and query.dtype != torch.float32:
            max_seqlen = packed_seq_params.max_seqlen_q
            output = _varlen_attention(query, key, value, cu_seqlens, max_seqlen, self.scale)
        else:
            output = padded_attention(query, key, value, cu_seqlens, self.scale)
        return output.reshape(output.size(0), -1)


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> Tensor:
    """Call torch's varlen attention, whose keywords differ between torch 2.11, 2.12 and 2.13."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    keywords: dict[str, Any] = {"scale": scale}
    if "window_size" in known:
        keywords["window_size"] = (-1, 0)
    else:
        keywords["is_causal"] = True
    if "enable_gqa" in known:
        keywords["enable_gqa"] = query.size(1) != key.size(1)
    else:
        repeats = query.size(1) // key.size(1)
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    return varlen_attn(
        query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **keywords
    )


@dataclasses.dataclass(frozen=True)
class _Bucket:
    """Sequences of similar length, right-padded to [batch, width]."""

    batch: int
    width: int
    rows: Tensor
    """int64 [n]: positions in the packed S of the bucket's tokens."""
    cells: Tensor
    """int64 [n]: where each of them stands in the flattened [batch * width]."""


def padded_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float
) -> Tensor:
    """Causal attention within each packed sequence.

    Args:
        query: [S, heads, d]. key, value: [S, groups, d].
        cu_seqlens: int32 [sequences + 1]; empty sequences are allowed.
        scale: factor on the scores.

    Returns:
        [S, heads, d]
    """
    output = torch.zeros_like(query)
    for bucket in _buckets(cu_seqlens.tolist(), query.device):
        padded = [_pad(x, bucket).transpose(1, 2) for x in (query, key, value)]
        attended = F.scaled_dot_product_attention(
            *padded, is_causal=True, scale=scale, enable_gqa=query.size(1) != key.size(1)
        )
        flat = attended.transpose(1, 2).reshape(bucket.batch * bucket.width, *query.shape[1:])
        output = output.index_add(0, bucket.rows, flat.index_select(0, bucket.cells))
    return output


def _pad(x: Tensor, bucket: _Bucket) -> Tensor:
    flat = x.new_zeros(bucket.batch * bucket.width, *x.shape[1:])
    flat = flat.index_copy(0, bucket.cells, x.index_select(0, bucket.rows))
    return flat.view(bucket.batch, bucket.width, *x.shape[1:])


def _buckets(cu_seqlens: list[int], device: torch.device) -> list[_Bucket]:
    starts = cu_seqlens[:-1]
    lengths = [b - a for a, b in zip(cu_seqlens[:-1], cu_seqlens[1:])]
    members = [i for i, length in enumerate(lengths) if length]
    if not members:
        return []
    width = max(lengths)
    rows = torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in members])
    cells = torch.cat([torch.arange(lengths[i]) + n * width for n, i in enumerate(members)])
    return [_Bucket(len(members), width, rows.to(device), cells.to(device))]

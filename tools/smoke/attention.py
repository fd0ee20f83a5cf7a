"""Section of tools/gpu_smoke.py: packed attention against the sequences one by one.

Compared are the output and the gradients of query, key and value, in float32 (calls of
scaled_dot_product_attention) and bfloat16 (on a GPU torch's varlen attention) with the same numbers
in float64, as a softmax of scores that is written out. Bounds: see parity.py; two
products and the softmax between them, forward and backward, over sums as long as a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tools.smoke.models import exact_float32, make_config
from tools.smoke.parity import UNIT_ROUNDOFF, relative
from tools.smoke.report import Row, judged
from tools.smoke.sizes import AttentionCase, Sizes
from tools.smoke.training import timed
from vapo_megatron.models.attention import PackedAttention
from vapo_megatron.models.build import transformer_config
from vapo_megatron.models.known import known_shape
from vapo_megatron.models.rope import Rotary
from vapo_megatron.parallel import backend
from vapo_megatron.planning.flops import causal_pairs

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType


class Tensors(NamedTuple):
    """query [S, heads, d], key and value [S, groups, d], gradient of the output [S, heads * d]."""

    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor


def attention(sizes: Sizes, directory: Path) -> list[Row]:
    """Compare every case in both dtypes, and time one."""
    exact_float32()
    rows = [
        compared("attention", dtype, case, dtype)
        for case in sizes.attention
        for dtype in UNIT_ROUNDOFF
    ]
    return [*rows, _timed(sizes.attention_timed)]


def compared(
    section: str,
    title: str,
    case: AttentionCase,
    dtype: str,
    layer: Callable[..., Tensor] | None = None,
) -> Row:
    """Judge an attention's output and gradients; layer: see packed."""
    # The same numbers in both dtypes: what bfloat16 holds exactly.
    tensors = random_tensors(case, torch.bfloat16)
    found, expected = packed(case, tensors, dtype, layer), written_out(case, tensors)
    errors = [relative(f, e) for f, e in zip(found, expected)]
    name = f"{title}, {case.heads} heads of {case.head_dim}, {case.groups} groups"
    what = "output and gradients, error"
    return judged(section, name, what, max(errors), rounding_bound(case, dtype))


def packed(
    case: AttentionCase, tensors: Tensors, dtype: str, layer: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    """Output and gradients of query, key and value; layer=None: the layers' own attention."""
    cast = Tensors(*(t.to(getattr(torch, dtype)) for t in tensors))
    layer = layer or _layer(case, dtype)
    leaves = [t.detach().requires_grad_() for t in cast[:3]]
    output = layer(*leaves, packed_seq_params=_bounds(case))
    output.backward(cast.upstream)
    return [output.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def written_out(case: AttentionCase, tensors: Tensors) -> list[Tensor]:
    """The same in float64, each sequence by itself: softmax(Q K^T / sqrt(d)) V over the past."""
    leaves = [t.detach().double().requires_grad_() for t in tensors[:3]]
    query, key, value = leaves
    repeats = case.heads // case.groups
    outputs, start = [], 0
    for length in case.lengths:
        mine = slice(start, start + length)
        k, v = (x[mine].repeat_interleave(repeats, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[mine], k) / math.sqrt(case.head_dim)
        future = torch.ones(length, length, device=scores.device).triu(1).bool()
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        start += length
    output = torch.cat(outputs).flatten(1)
    output.backward(tensors.upstream.double())
    return [output.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def rounding_bound(case: AttentionCase, dtype: str) -> float:
    """Largest relative error that rounding explains."""
    longest = max(*case.lengths, case.head_dim) if dtype == "float32" else 1
    return 2 * UNIT_ROUNDOFF[dtype] * math.sqrt(2 * 3 * longest)


def random_tensors(case: AttentionCase, dtype: torch.dtype) -> Tensors:
    """Draw normal numbers on this device."""
    draw = torch.Generator().manual_seed(0)
    size = sum(case.lengths)
    heads, groups = ((size, n, case.head_dim) for n in (case.heads, case.groups))
    shapes: tuple[tuple[int, ...], ...] = (heads, groups, groups, (size, heads[1] * heads[2]))
    drawn = (torch.randn(s, generator=draw) for s in shapes)
    return Tensors(*(t.to(backend.device(), dtype) for t in drawn))


def _layer(case: AttentionCase, dtype: str) -> PackedAttention:
    """The attention of a layer whose rotation turns nothing."""
    shape = known_shape("Qwen2.5-0.5B")
    config = make_config(dtype, layer_spec="local")
    return PackedAttention(
        transformer_config(shape, config.model, config.parallel), 1, AttnMaskType.causal, "self",
        case.head_dim**-0.5, rotary=Rotary(torch.zeros(case.head_dim // 2)),
    )  # fmt: skip


def _bounds(case: AttentionCase) -> PackedSeqParams:
    """Where the sequences begin and end, as a model gives it to its layers."""
    bounds = torch.tensor([0, *case.lengths]).cumsum(0).int().to(backend.device())
    longest = max(case.lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds,
        max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip


def _timed(case: AttentionCase) -> Row:
    """Time forward and backward in bfloat16, the second of two; FLOPs: planning/flops.py."""
    tensors = random_tensors(case, torch.bfloat16)
    layer, parameters = _layer(case, "bfloat16"), _bounds(case)
    leaves = [t.requires_grad_() for t in tensors[:3]]

    def call() -> None:
        layer(*leaves, packed_seq_params=parameters).backward(tensors.upstream)

    timed(call)
    seconds, _ = timed(call)
    rate = 3 * 4 * case.heads * case.head_dim * causal_pairs(case.lengths) / seconds
    return Row(
        "attention",
        f"bfloat16, {len(case.lengths)} sequences of {case.lengths[0]} tokens, "
        f"{case.heads} heads of {case.head_dim}",
        f"{1e3 * seconds:.2f} ms forward and backward, {rate / 1e12:.3g} TFLOP/s",
        figures={"seconds": seconds, "flops_per_second": rate},
    )

"""Rotary frequencies, the same as those of transformers and vLLM.

megatron-core hard-codes the constants of the scalings that it has. Here the frequencies are
computed from the HF config, for every layer implementation. YaRN's factor on cosine and sine
becomes a factor on the attention scores: it scales query and key, so its square scales the scores.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from vapo_megatron.models.hf_config import ModelShape


def rope_frequencies(shape: ModelShape) -> Tensor:
    """Angle per position of each pair of dimensions.

    default:  f_i = theta^(-2i/d)
    linear:   f_i / factor
    llama3:   (1 - s) f_i / factor + s f_i,  s = (L f_i / 2 pi - low) / (high - low) in [0, 1]
    yarn:     r f_i / factor + (1 - r) f_i,  r = (i - i_fast) / (i_slow - i_fast) in [0, 1], where
              i_x = d ln(L / (2 pi beta_x)) / (2 ln theta), rounded outwards, is the dimension
              that turns beta_x times within the original context L

    Source: RoPE arXiv 2104.09864; position interpolation arXiv 2306.15595; Llama 3.1's released
    code; YaRN arXiv 2309.00071, section 3.2.

    Returns:
        float32 [head_dim / 2], on the CPU.
    """
    size = shape.head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    frequencies = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    slowed = frequencies / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slowed
    if scaling["rope_type"] == "llama3":
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        kept = 1 - _yarn_ramp(shape)
    return (1 - kept) * slowed + kept * frequencies


def _yarn_ramp(shape: ModelShape) -> Tensor:
    """0 where a dimension turns often and keeps its frequency, 1 where it is interpolated."""
    scaling = shape.rope_scaling
    assert scaling is not None
    length = scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        ratio = math.log(length / (turns * 2 * math.pi))
        return shape.head_dim * ratio / (2 * math.log(shape.rope_theta))

    first = dimension(scaling.get("beta_fast") or 32)
    last = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, shape.head_dim - 1)
    if first == last:
        last += 0.001
    index = torch.arange(shape.head_dim // 2, dtype=torch.float32, device="cpu")
    return ((index - first) / (last - first)).clamp(0, 1)


def attention_factor(shape: ModelShape) -> float:
    """Factor on cosine and sine: 0.1 ln(factor) + 1 for YaRN (its equation 22), else 1."""
    scaling = shape.rope_scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = scaling["factor"]

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return scale(scaling["mscale"]) / scale(scaling["mscale_all_dim"])
    return scale(1.0)


def softmax_scale(shape: ModelShape) -> float:
    """Factor on the attention scores: attention_factor^2 / sqrt(head_dim)."""
    return attention_factor(shape) ** 2 / math.sqrt(shape.head_dim)


class Rotary:
    """Rotates query and key of packed sequences; one instance is shared by a model's layers.

    Dimension i is paired with i + d/2, as in transformers:
        (x_i, x_{i+d/2}) -> (x_i cos a - x_{i+d/2} sin a, x_{i+d/2} cos a + x_i sin a),  a = p f_i

    Cosines and sines are computed once for each batch, by the first layer, and cached as long as
    its cu_seqlens live. Nothing is read back from the device, which would synchronize.

    Args:
        frequencies: float32 [d / 2], from rope_frequencies.
    """

    def __init__(self, frequencies: Tensor) -> None:
        self.frequencies = frequencies
        self._tables = WeakTensorKeyDictionary()

    def __call__(
        self, query: Tensor, key: Tensor, cu_seqlens: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate by the position p within each sequence.

        Args:
            query: [S, heads, d]. key: [S, groups, d].
            cu_seqlens: int32 [sequences + 1], from 0 to S; not changed in place afterwards.
            rows: int64 [S'], the same for the same cu_seqlens: query and key are of these tokens of
                S alone.
        """
        table = self._tables.get(cu_seqlens)
        if table is None or table[0].dtype != query.dtype:
            table = self._compute_table(cu_seqlens, query, rows)
            self._tables[cu_seqlens] = table
        cos, sin = table
        return _Rotate.apply(query, cos, sin), _Rotate.apply(key, cos, sin)

    def _compute_table(
        self, cu_seqlens: Tensor, query: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position of a packed batch: [S, 1, d / 2]."""
        if self.frequencies.device != query.device:
            self.frequencies = self.frequencies.to(query.device)
        index = rows
        if index is None:
            index = torch.arange(query.size(0), device=query.device)
        index = index.to(cu_seqlens.dtype)
        sequence = torch.searchsorted(cu_seqlens[1:], index, right=True)
        positions = index - cu_seqlens[sequence]
        angles = torch.outer(positions.float(), self.frequencies)[:, None]
        return angles.cos().to(query.dtype), angles.sin().to(query.dtype)


class _Rotate(torch.autograd.Function):
    """The gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    rotated = torch.empty_like(x)
    out_first, out_second = rotated.chunk(2, -1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return rotated

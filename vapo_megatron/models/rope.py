"""Rotary frequencies, the same as those of transformers and vLLM.

megatron-core has rotary embeddings of its own for some scalings, with constants that a config
cannot reach. Here the frequencies are computed once from the HF config and given to its plain
rotary embedding, whatever the layers' implementation. YaRN's factor on cosine and sine becomes a
factor on the attention scores: it enters the query and the key, so it enters the scores squared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

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

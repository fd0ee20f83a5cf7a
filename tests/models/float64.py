"""transformers' model of any family, float64 throughout.

transformers casts norms and softmax to float32 even in a float64 model; here both are computed in
float64. Only the cosines and sines of the rotary embedding are float32 numbers, which is how the
model families define them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def load_float64(directory: str) -> Any:
    """The ...ForCausalLM that config.json names."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("float64", _attention)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="float64"
    )
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    assert len(norms) > 2 * model.config.num_hidden_layers
    for module in norms:
        module.forward = _norm.__get__(module)
    return model


def _norm(self: Any, hidden: Tensor) -> Tensor:
    variance = hidden.square().mean(-1, keepdim=True)
    return self.weight * (hidden * torch.rsqrt(variance + self.variance_epsilon))


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, **__: Any
) -> tuple[Tensor, None]:
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    assert weights.dtype == torch.float64
    return (weights @ value).transpose(1, 2).contiguous(), None

"""transformers' model of any family, float64 throughout.

transformers casts norms, softmax and the weights of experts to float32 even in a float64 model;
here all are computed in float64. Only the cosines and sines of the rotary embedding are float32
numbers, which is how the model families define them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def load_float64(directory: str) -> Any:
    """The ...ForCausalLM that config.json names."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("float64", _attention)
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float64,
        attn_implementation="float64",
        experts_implementation="eager",
    )
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]
    assert len(norms) > 2 * model.config.num_hidden_layers
    for module in norms:
        module.forward = _norm.__get__(module)
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = _route.__get__(module)
            module.margins, module.chosen, module.replayed = [], [], False
    return model


def replay_routes(model: Any) -> None:
    """From now on each router chooses what it chose so far, call by call, from the first one."""
    for module in model.modules():
        if hasattr(module, "chosen"):
            module.replayed = True


def chosen_routes(model: Any) -> list[Tensor]:
    """What each router has chosen so far, int64 [tokens, experts per token], by layer."""
    return [torch.cat(module.chosen) for module in model.modules() if hasattr(module, "chosen")]


def by_hf_name(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by a checkpoint's names: transformers holds a layer's experts in one parameter."""
    found = {}
    for name, tensor in named.items():
        stem, _, what = name.rpartition(".experts.")
        for expert, own in enumerate(tensor if stem else ()):
            where = f"{stem}.experts.{expert}."
            if what == "down_proj":
                found[f"{where}down_proj.weight"] = own
            else:
                found[f"{where}gate_proj.weight"], found[f"{where}up_proj.weight"] = own.chunk(2)
        if not stem:
            found[name] = tensor
    return found


def smallest_margin(model: Any) -> float:
    """By how much the worst chosen expert's logit was above the best other's, of all tokens so far.

    Where it is far above float32's rounding, any computation chooses the same experts.
    """
    return min(m for module in model.modules() for m in getattr(module, "margins", []))


def _route(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = hidden.reshape(-1, self.hidden_dim) @ self.weight.T
    best = logits.detach().topk(self.top_k + 1).values
    self.margins.append(float((best[:, -2] - best[:, -1]).min()))
    scores = logits.softmax(-1)
    chosen, experts = scores.topk(self.top_k)
    if self.replayed:
        experts = self.chosen.pop(0)
        chosen = scores.gather(1, experts)
    else:
        self.chosen.append(experts)
    assert chosen.dtype == torch.float64
    if self.norm_topk_prob:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return logits, chosen, experts


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

"""A vLLM model's weights in place, and loading Hugging Face tensors into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from vapo_megatron.weights.reshard.plan import LiveWeight

_OF_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""Of what vLLM's parameters of all experts are made."""


def live_weights(model: Any) -> dict[str, LiveWeight]:
    """Return every parameter and persistent buffer of this rank by name; tied ones once.

    A layer's experts, [experts, rows, columns], are viewed as one matrix, one below the other.
    Scalars are left out: they are scales of a quantized cache, which vLLM sets itself.

    Args:
        model: vLLM's; its vocabulary layers know their padding.
    """
    padding = {
        f"{name}.weight": module.weight.shape[0] - module.shard_indices.num_org_elements
        for name, module in model.named_modules()
        if hasattr(module, "shard_indices")
    }
    found: dict[str, LiveWeight] = {}
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in model.state_dict().items():
        storage = (tensor.data_ptr(), tensor.shape)
        if tensor.dim() > 0 and storage not in seen:
            seen.add(storage)
            matrix = tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 2 else tensor
            # Layers with room for adapters hold the layer that they stand for.
            found[name.replace(".base_layer.", ".")] = LiveWeight(matrix, padding.get(name, 0))
    return found


def load_hf_tensors(model: Any, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Replace all weights by Hugging Face names and full tensors, with vLLM's own loaders.

    Raises:
        RuntimeError: a parameter is missing or given twice.
    """
    given: set[str] = set()

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_tensors:
            if name in given:
                raise RuntimeError(f"weight {name} was given to the engine twice")
            given.add(name)
            yield name, tensor

    with torch.no_grad():
        loaded = model.load_weights(watched())
    missing = _missing_weights(model, given, loaded or set())
    if missing:
        raise RuntimeError(
            f"{len(missing)} of the engine's weights were not given: {', '.join(missing[:5])}"
        )


def _missing_weights(model: Any, given: set[str], loaded: set[str]) -> list[str]:
    """Return the names that the model needs and did not get.

    `loaded` is not enough: it has a fused parameter as soon as one of its parts was loaded.
    """
    fused = getattr(model, "packed_modules_mapping", {})
    missing = set()
    for name, _ in model.named_parameters():
        parts = {name}
        for whole, pieces in fused.items():
            if f".{whole}." in name:
                parts = {name.replace(f".{whole}.", f".{piece}.") for piece in pieces}
        stem, _, of_experts = name.partition(".routed_experts.")
        if of_experts:
            pieces = _OF_EXPERTS[of_experts]
            count = model.config.num_experts
            parts = {f"{stem}.{e}.{piece}.weight" for e in range(count) for piece in pieces}
        missing |= parts - given
        missing |= {name} - loaded
    return sorted(missing)

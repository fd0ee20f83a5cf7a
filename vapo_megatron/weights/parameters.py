"""Matches this rank's parameters with the rows of the name table."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vapo_megatron.config.lora import LoraConfig
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.weights.adapter_table import ADAPTER, adapter_rows
from vapo_megatron.weights.table import LAYER, Row, rows, shift_expert


@dataclasses.dataclass(frozen=True)
class LocalParameter:
    """A parameter of this rank, with its row of the table."""

    name: str
    """Within its model chunk."""
    data: Tensor
    """The model's own storage; bfloat16 where the optimizer keeps float32 main parameters."""
    row: Row
    hf_names: tuple[str, ...]
    """With the layer's number in the whole model."""
    layer: int
    """In the whole model; 0 outside the layers."""
    adapter: Any = None
    """models.adapters.Adapter beside a weight."""

    @property
    def merged(self) -> Tensor:
        """The weight that the model computes with: its adapter's product is added."""
        return self.data if self.adapter is None else self.adapter.merged(self.data)


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the GPTModel inside DDP and mixed-precision wrappers."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def local_parameters(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, role: str, lora: LoraConfig | None = None
) -> list[LocalParameter]:
    """Match every parameter of this rank's model chunks with its row, in the model's order.

    Layers are numbered by the model (`layer_number`, from 1), so that any pipeline layout works,
    and experts by `local_expert_indices`.

    Args:
        lora: match the adapters' parameters in place of all others; None: leave them out.
    """
    by_name: dict[str, list[Row]] = {}
    for row in rows(shape, role) if lora is None else adapter_rows(shape, lora):
        for name in row.megatron:
            by_name.setdefault(name, []).append(row)
    found = []
    for chunk in map(unwrap, chunks):
        adapters = adapters_of(chunk)
        for name, parameter in chunk.named_parameters():
            if (ADAPTER in name) != (lora is not None):
                continue
            match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
            layer, key = 0, name
            if match:
                module: Any = chunk.decoder.layers[int(match[1])]  # type: ignore
                layer = module.layer_number - 1
                experts = getattr(module.mlp, "local_expert_indices", [0])
                key = LAYER + shift_expert(match[2], experts[0])
            # A name may be in several rows, for different layers.
            fitting = [r for r in by_name.get(key, ()) if not match or layer in r.layers(shape)]
            assert len(fitting) == 1, f"parameter {name} of the {role} is not in the name table"
            row = fitting[0]
            hf_names = tuple(n.format(layer) for n in row.hf)
            adapter = adapters.get(name.removesuffix(".weight"))
            found.append(LocalParameter(name, parameter.data, row, hf_names, layer, adapter))
    return found


def adapters_of(chunk: torch.nn.Module) -> dict[str, Any]:
    """Return the adapters of a model chunk by the names of the linear layers beside them."""
    modules = chunk.named_modules() if isinstance(chunk, torch.nn.Module) else ()
    return {
        name.removesuffix(ADAPTER): module for name, module in modules if name.endswith(ADAPTER)
    }

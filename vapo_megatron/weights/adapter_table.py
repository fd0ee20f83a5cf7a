"""The name table's rows of adapters (LoRA): one A and one B for each Hugging Face matrix.

A module stands beside the linear layer that it adapts (models/adapters.py): its A are one
parameter for each matrix, its B one for all, cut and interleaved as the layer's weight is, so that
each rank holds the rows of B that it holds of the weight. Where a layer's weight is cut by columns,
A is. Hugging Face's names are PEFT's, without the prefix that they have in a file. Imports no
torch, so that planning counts from it.
"""

from __future__ import annotations

import functools

from vapo_megatron.config.lora import ATTENTION, TARGETS, LoraConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.weights.table import Row, Shapes, rows

ADAPTER = "_adapter"
"""Behind a linear layer's name: the module of its adapters."""


def adapter_rows(shape: ModelShape, lora: LoraConfig) -> tuple[Row, ...]:
    """Return the rows of a model's adapters, the same for actor and critic."""
    assert lora.rank is not None, "there are no adapters"
    return _rows(shape, lora.rank, targets_of(shape, lora))


def targets_of(shape: ModelShape, lora: LoraConfig) -> tuple[str, ...]:
    """Return the names of the matrices with an adapter, each once; with experts the attention's.

    Raises:
        ConfigError: others are asked for.
    """
    if shape.experts is None:
        return tuple(dict.fromkeys(lora.targets or TARGETS))
    wrong = [target for target in lora.targets or () if target not in ATTENTION]
    if wrong:
        raise ConfigError(
            f"model.lora.targets={lora.targets}: {', '.join(wrong)} would be of experts, which "
            f"have no adapters; choose among {', '.join(ATTENTION)}"
        )
    return tuple(dict.fromkeys(lora.targets or ATTENTION))


def adapter_tensors(shape: ModelShape, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every matrix of the adapters' rows, layer by layer.

    A B is among them whose matrix is no target, but belongs to the same weight as one; it is 0.
    """
    return {
        name.format(layer): size
        for layer in range(shape.num_layers)
        for row in adapter_rows(shape, lora)
        for name, size in zip(row.hf, row.shapes(shape), strict=True)
    }


def target_of(name: str) -> str:
    """Return q_proj of model.layers.{}.self_attn.q_proj.weight, or of its adapter's matrices."""
    return name.split(".lora_")[0].removesuffix(".weight").rpartition(".")[2]


def is_adapted(row: Row, shape: ModelShape, targets: tuple[str, ...]) -> bool:
    """Have any matrices of a row of the model's table an adapter?"""
    return row.is_layer_matrix(shape) and any(target_of(name) in targets for name in row.hf)


@functools.lru_cache(maxsize=64)
def _rows(shape: ModelShape, rank: int, targets: tuple[str, ...]) -> tuple[Row, ...]:
    adapted = [row for row in rows(shape, "actor") if is_adapted(row, shape, targets)]
    return tuple(new for row in adapted for new in _of_layer(row, shape, rank, targets))


def _of_layer(row: Row, shape: ModelShape, rank: int, targets: tuple[str, ...]) -> list[Row]:
    """Return the rows of the A of one linear layer, and that of its B.

    B has rows of all matrices of the layer's weight; those of a matrix that is no target are 0.
    """
    module, by_columns = row.megatron[0].removesuffix(".weight") + ADAPTER, row.kind == "row"
    sizes = row.shapes(shape)
    found = [
        Row(
            (f"{module}.A.{target_of(name)}",), (_named(name, "A"),),
            "row" if by_columns else "replicated", _always(((rank, columns),)), layers=row.layers,
        )
        for name, (_, columns) in zip(row.hf, sizes, strict=True)
        if target_of(name) in targets
    ]  # fmt: skip
    outputs = tuple((num_rows, rank) for num_rows, _ in sizes)
    names = tuple(_named(name, "B") for name in row.hf)
    kind = "replicated" if by_columns else row.kind
    return [*found, Row((f"{module}.B",), names, kind, _always(outputs), layers=row.layers)]


def _named(name: str, matrix: str) -> str:
    return name.removesuffix("weight") + f"lora_{matrix}.weight"


def _always(sizes: Shapes):  # type: ignore[no-untyped-def]
    return lambda shape: sizes

"""Which parameters are matrices to Dion and Muon, and how their shards are made of them.

All linear weights inside layers are (Row.is_layer_matrix); embeddings, the output layer, a value
head, norms and biases are not. A fused parameter (query, key and value; gate and up) is several
matrices, as Hugging Face has them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.matrix_weights import Part, Weight
from vapo_megatron.weights.holders import part_bounds, shard_axis, shard_dim
from vapo_megatron.weights.layout import row_runs
from vapo_megatron.weights.parameters import LocalParameter, local_parameters


def trained_weights(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, ranks: Ranks, role: str
) -> list[Weight]:
    """Describe this rank's parameters that require a gradient, in the model's order."""
    found = local_parameters(chunks, shape, role)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    return [
        _described(one, parameter, shape, ranks)
        for one, parameter in zip(found, parameters, strict=True)
        if parameter.requires_grad
    ]


def _described(
    one: LocalParameter, parameter: torch.nn.Parameter, shape: ModelShape, ranks: Ranks
) -> Weight:
    row, kind = one.row, one.row.kind
    matrix = row.is_layer_matrix(shape)
    return Weight(
        parameter,
        name=" ".join(one.hf_names),
        dim=shard_dim(kind),
        parts=_parts(one, shape, ranks) if matrix else (),
        layer=one.layer if matrix else -1,
        num_stacked=len(row.hf) if kind == "gate_up" else 1,
        is_padded=kind == "vocabulary",
        is_copy=row.is_copy,
    )


def _parts(one: LocalParameter, shape: ModelShape, ranks: Ranks) -> tuple[Part, ...]:
    row, kind = one.row, one.row.kind
    shapes, dim = row.shapes(shape), shard_dim(kind)
    assert dim is not None, f"every rank holds all of {one.hf_names}"
    axis, groups = shard_axis(row, ranks), shape.num_key_value_heads
    sizes = [size[dim] for size in shapes]
    bounds = part_bounds(
        kind, sizes, axis.rank, axis.size, num_groups=groups, padded_rows=0
    )  # fmt: skip
    # Rows, though columns may be what is cut.
    held = [size[0] if dim else stop - start for size, (start, stop) in zip(shapes, bounds)]
    # A piece of one key-value head's rows is in order.
    runs = row_runs(kind, held, num_groups=max(1, groups // axis.size))
    return tuple(
        Part(
            name, (size[0], size[1]),
            tuple((r.start, r.num_rows) for r in runs if r.tensor == i and r.num_rows), bound,
        )
        for i, (name, size, bound) in enumerate(zip(one.hf_names, shapes, bounds, strict=True))
    )  # fmt: skip

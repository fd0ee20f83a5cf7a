"""The tensors of a megatron-core distributed checkpoint: names, shapes, shards.

A checkpoint describes full tensors: layers are a first dimension, tensor-parallel shards are joined
(gate_up: all gate rows, then all up rows), and layer norms have Transformer Engine's names for
either layer implementation. In a model with experts each layer has names of its own, and its
experts are a first dimension. So all shapes but the padded vocabulary's are the same for every
layout, and any layout can read what any other wrote.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from vapo_megatron.config.lora import LoraConfig
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.weights.adapter_table import adapter_rows
from vapo_megatron.weights.holders import (
    Member,
    TrainerLayout,
    bounds,
    cut_rank,
    num_shards,
    shard_dim,
)
from vapo_megatron.weights.layout import RowRun, row_runs
from vapo_megatron.weights.table import VALUE_HEAD, VALUE_HEAD_BIAS, Row, rows_in_order

_BIAS_ROW = Row(("output_layer.bias",), (VALUE_HEAD_BIAS,), "replicated", lambda shape: ((1,),))
"""Not in the name table, because it is no parameter."""
EXTRA_STATES = (
    "decoder.layers.self_attention.core_attention._extra_state",
    "decoder.layers.self_attention.linear_qkv._extra_state",
    "decoder.layers.self_attention.linear_proj._extra_state",
    "decoder.layers.mlp.linear_fc1._extra_state",
    "decoder.layers.mlp.linear_fc2._extra_state",
)
"""Per layer; empty without FP8. megatron-core requires those of its layers. Not of experts."""
_EXPERT_KEY = re.compile(r"\.experts\.(linear_fc[12]\.weight)\d+$")


@dataclasses.dataclass(frozen=True)
class Box:
    """Part of a tensor that some ranks hold."""

    member: Member | None
    """Which, of those of a stage; None: all."""
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int


@dataclasses.dataclass(frozen=True)
class ShardedTensor:
    """One layer's or expert's part of a checkpoint's tensor, or a tensor that has no such parts."""

    key: str
    row: Row
    layer: int | None
    index: int | None
    """Along the first dimension: a layer's, or an expert's; None: it has no such dimension."""
    count: int
    """Of layers or experts."""
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    num_rows: int
    """With the vocabulary's padding."""
    num_groups: int

    @property
    def num_columns(self) -> int:
        """1 for a vector, whose elements are its rows."""
        return self.hf_shapes[0][1] if len(self.hf_shapes[0]) == 2 else 1

    @property
    def runs(self) -> list[RowRun]:
        """Its rows' origin in the HF tensors."""
        sizes = [size[0] for size in self.hf_shapes]
        return row_runs(self.row.kind, sizes, num_groups=self.num_groups)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape in the checkpoint's metadata."""
        return self.part(self.count, self.num_rows, self.num_columns)

    def part(self, first: int, num_rows: int, num_columns: int) -> tuple[int, ...]:
        """Return (first, rows, columns) without the dimensions that the tensor does not have."""
        head = () if self.index is None else (first,)
        tail = (num_columns,) if len(self.hf_shapes[0]) == 2 else ()
        return (*head, num_rows, *tail)

    def boxes(self, place: TrainerLayout) -> Iterator[Box]:
        """Yield what the ranks write; the first one that holds something writes it."""
        dim, columns = shard_dim(self.row.kind), self.num_columns
        tp_size = num_shards(self.row, place.tp_size)
        for member in place.slices(self.row):
            rank = cut_rank(member)
            if dim is None:
                yield Box(member, 0, self.num_rows, 0, columns)
            elif dim == 1:
                start, stop = bounds(columns, rank, tp_size)
                yield Box(member, 0, self.num_rows, start, stop - start)
            else:
                halves = len(self.hf_shapes) if self.row.kind == "gate_up" else 1
                size = self.num_rows // halves
                for half in range(halves):
                    start, stop = bounds(size, rank, tp_size)
                    yield Box(member, half * size + start, stop - start, 0, columns)


def sharded_tensors(
    shape: ModelShape,
    role: str,
    padded_vocab: int,
    *,
    value_bias: bool = False,
    lora: LoraConfig | None = None,
) -> list[ShardedTensor]:
    """List a model's tensors in HF order.

    Args:
        role: "actor" or "critic".
        padded_vocab: rows of the embedding with its padding.
        value_bias: the value head has a bias.
        lora: those of its adapters and of a value head alone.
    """
    order = rows_in_order(shape, role)
    if lora is not None:
        of_layers = [(row, n) for n in range(shape.num_layers) for row in adapter_rows(shape, lora)]
        order = [*of_layers, *((row, None) for row, _ in order if row.hf == (VALUE_HEAD,))]
    if value_bias:
        order.append((_BIAS_ROW, None))
    tensors, num_layers = [], shape.num_layers
    for row, layer in order:
        shapes = row.shapes(shape)
        unpadded = sum(size[0] for size in shapes)
        key, index, count = row.megatron[-1].replace("layers.{}.", "layers."), layer, num_layers
        if shape.experts is not None:
            key = _EXPERT_KEY.sub(r".experts.experts.\1", row.megatron[-1]).format(layer)
            index, count = row.expert, shape.experts.count
        tensors.append(
            ShardedTensor(
                key=key,
                row=row,
                layer=layer,
                index=index,
                count=count,
                hf_names=tuple(name.format(layer) for name in row.hf),
                hf_shapes=shapes,
                num_rows=padded_vocab if row.kind == "vocabulary" else unpadded,
                num_groups=shape.num_key_value_heads,
            )
        )
    return tensors


def is_of_model(key: str) -> bool:
    """Is this a model's tensor, not optimizer state?"""
    return re.match(r"(embedding|decoder|output_layer)\.", key) is not None

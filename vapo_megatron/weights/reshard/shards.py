"""Which part of which HF tensor each trainer rank holds, as data.

Everything is stated in the coordinates of the HF tensors, so that two layouts (the sampler's is in
vllm_layout.py) meet there. A bias or a norm counts as one column. The name table (mapping.py) says
which tensors make a parameter. Ranks are numbered tensor parallel fastest, then data parallel, then
pipeline. Padding rows of a vocabulary are nobody's: they are in no piece.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from vapo_megatron.models.hf_config import padded_vocab_size
from vapo_megatron.weights import layout
from vapo_megatron.weights.mapping import EMBEDDING, Row

if TYPE_CHECKING:
    from vapo_megatron.models.hf_config import ModelShape

LayerRange = tuple[int, int]
"""[first, stop) of consecutive layers, numbered from 0 in the whole model."""

Rectangle = tuple[int, int, int, int]
"""(row, column, rows, columns)."""


class Piece(NamedTuple):
    """A rectangle of an HF tensor, and its place in a local parameter; in elements."""

    tensor: str
    """HF name; `{}` stands for the layer."""
    row: int
    column: int
    rows: int
    columns: int
    parameter: str
    """Local name; `{}` stands for the layer."""
    local_row: int
    local_column: int


@dataclasses.dataclass(frozen=True)
class TrainerLayout:
    """Where megatron-core keeps the model's parameters."""

    tp_size: int
    dp_size: int
    """Ranks with the same parameters, those of context parallelism among them."""
    layers: tuple[tuple[LayerRange, ...], ...]
    """layers[stage][chunk]; a stage has one chunk per virtual stage."""
    vocab_rows: int
    """Of the padded vocabulary, over all tensor-parallel ranks."""
    transformer_engine: bool = False
    """Which of the table's two names a parameter has."""

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return len(self.layers)

    @property
    def last_chunk(self) -> int:
        """Index of a stage's last chunk: on the last stage it holds the output."""
        return len(self.layers[0]) - 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp_size * self.dp_size * self.pp_size

    def stage_of(self, row: Row) -> int:
        """Return the stage that holds a row outside the layers (of a copy: the last has it)."""
        return 0 if row.hf == (EMBEDDING,) and not row.is_copy else self.pp_size - 1

    def rank(self, stage: int, dp_rank: int, tp_rank: int) -> int:
        """Return the global rank."""
        return tp_rank + self.tp_size * (dp_rank + self.dp_size * stage)


def trainer_layout(
    shape: ModelShape,
    *,
    tp_size: int,
    pp_size: int,
    vpp_size: int = 1,
    dp_size: int,
    make_vocab_size_divisible_by: int = 128,
    transformer_engine: bool = False,
) -> TrainerLayout:
    """Describe megatron-core's placement: equal chunks, chunk v of all stages before chunk v + 1.

    Args:
        shape: of the model; hf_config.check_layout has accepted the sizes.
        tp_size, pp_size, vpp_size, dp_size: ranks on each axis, and model chunks of each rank;
            dp_size is CP x DP, the ranks with the same parameters.
        make_vocab_size_divisible_by: model.make_vocab_size_divisible_by.
        transformer_engine: layer_spec.uses_transformer_engine.
    """
    assert shape.num_layers % (pp_size * vpp_size) == 0, f"{shape.num_layers} layers do not divide"
    assert vpp_size == 1 or pp_size > 1, "virtual stages need a pipeline"
    size = shape.num_layers // (pp_size * vpp_size)
    firsts = [[(v * pp_size + p) * size for v in range(vpp_size)] for p in range(pp_size)]
    return TrainerLayout(
        tp_size=tp_size,
        dp_size=dp_size,
        layers=tuple(tuple((first, first + size) for first in stage) for stage in firsts),
        vocab_rows=padded_vocab_size(shape, make_vocab_size_divisible_by, tp_size),
        transformer_engine=transformer_engine,
    )


def trainer_pieces(
    row: Row, shape: ModelShape, trainer: TrainerLayout, tp_rank: int
) -> list[Piece]:
    """List what a tensor-parallel rank of the trainer holds of one row of the name table."""
    name = row.megatron[-1] if trainer.transformer_engine else row.megatron[0]
    cut = rectangles(row, shape, tp_rank, trainer.tp_size, trainer.vocab_rows)
    if row.kind != "qkv":
        return stacked(row.hf, cut, name)
    # A shard interleaves its key-value heads; see layout.merge_qkv.
    num_groups = max(1, shape.num_key_value_heads // trainer.tp_size)
    groups = [
        (row_ + rows // num_groups * group, column, rows // num_groups, columns)
        for group in range(num_groups)
        for row_, column, rows, columns in cut
    ]
    return stacked(row.hf * num_groups, groups, name)


def rectangles(
    row: Row, shape: ModelShape, tp_rank: int, tp_size: int, vocab_rows: int
) -> list[Rectangle]:
    """List a tensor-parallel rank's part of each HF tensor; see layout.part_bounds."""
    sizes = matrix_sizes(row, shape)
    dim = layout.shard_dim(row.kind)
    if dim is None:
        return [(0, 0, *size) for size in sizes]
    all_bounds = layout.part_bounds(
        row.kind,
        [size[dim] for size in sizes],
        tp_rank,
        tp_size,
        num_groups=shape.num_key_value_heads,
        padded_rows=vocab_rows,
    )
    return [cut_along(size, dim, *part) for size, part in zip(sizes, all_bounds, strict=True)]


def matrix_sizes(row: Row, shape: ModelShape) -> list[tuple[int, int]]:
    """Return rows and columns of each HF tensor."""
    return [(size[0], size[1] if len(size) > 1 else 1) for size in row.shapes(shape)]


def cut_along(size: tuple[int, int], dim: int, start: int, stop: int) -> Rectangle:
    """Return [start, stop) along one dimension."""
    rows, columns = size
    if dim == 0:
        return start, 0, stop - start, columns
    return 0, start, rows, stop - start


def stacked(tensors: tuple[str, ...], parts: list[Rectangle], parameter: str) -> list[Piece]:
    """Stack rectangles in one parameter; the tensors take turns."""
    pieces, below = [], 0
    for i, rectangle in enumerate(parts):
        if rectangle[2]:
            pieces.append(Piece(tensors[i % len(tensors)], *rectangle, parameter, below, 0))
        below += rectangle[2]
    return pieces

"""Which part of which HF tensor each trainer rank holds, as data.

Everything is stated in the coordinates of the HF tensors, so that two layouts (the engine's is in
vllm_layout.py) meet there. A bias or a norm counts as one column. The name table (table.py) says
which tensors make a parameter, holders.py who holds it. Padding rows of a vocabulary belong to no
piece.
"""

from __future__ import annotations

from typing import NamedTuple

from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.weights.holders import TrainerLayout, num_shards, parts, shard_dim
from vapo_megatron.weights.table import Row

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


def trainer_pieces(
    row: Row, shape: ModelShape, trainer: TrainerLayout, tp_rank: int
) -> list[Piece]:
    """List what a rank of the trainer holds of one row of the name table, if it has the row.

    Args:
        row: of the table; an expert is not cut.
        tp_rank: the rank's, or 0 of what is not cut.
    """
    name, tp_size = trainer.local_name(row), num_shards(row, trainer.tp_size)
    parts_held = rectangles(row, shape, tp_rank, tp_size, trainer.vocab_rows)
    if row.kind != "qkv":
        return stacked(row.hf, parts_held, name)
    # A shard interleaves its key-value heads; see layout.merge_qkv.
    num_groups = max(1, shape.num_key_value_heads // trainer.tp_size)
    groups = [
        (row_ + rows // num_groups * group, column, rows // num_groups, columns)
        for group in range(num_groups)
        for row_, column, rows, columns in parts_held
    ]
    return stacked(row.hf * num_groups, groups, name)


def rectangles(
    row: Row, shape: ModelShape, tp_rank: int, tp_size: int, vocab_rows: int
) -> list[Rectangle]:
    """List a tensor-parallel rank's part of each HF tensor; see holders.parts."""
    sizes, dim = matrix_sizes(row, shape), shard_dim(row.kind)
    if dim is None:
        return [(0, 0, *size) for size in sizes]
    held = parts(row, shape, tp_rank, tp_size, vocab_rows)
    return [slice_along(size, dim, *part) for size, part in zip(sizes, held, strict=True)]


def matrix_sizes(row: Row, shape: ModelShape) -> list[tuple[int, int]]:
    """Return rows and columns of each HF tensor."""
    return [(size[0], size[1] if len(size) > 1 else 1) for size in row.shapes(shape)]


def slice_along(size: tuple[int, int], dim: int, start: int, stop: int) -> Rectangle:
    """Return [start, stop) along one dimension."""
    rows, columns = size
    if dim == 0:
        return start, 0, stop - start, columns
    return 0, start, rows, stop - start


def stacked(
    tensors: tuple[str, ...], parts: list[Rectangle], parameter: str, below: int = 0
) -> list[Piece]:
    """Stack rectangles in one parameter, from row `below` on; the tensors take turns."""
    pieces = []
    for i, rectangle in enumerate(parts):
        if rectangle[2]:
            pieces.append(Piece(tensors[i % len(tensors)], *rectangle, parameter, below, 0))
        below += rectangle[2]
    return pieces

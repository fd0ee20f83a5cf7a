"""What the optimizer of matrices knows of this rank's parameters."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vapo_megatron.parallel.owners import num_pieces

BASIS_ROWS = 256
"""Rows of an initial basis that are drawn together; a rank draws no others than it needs."""


class Part(NamedTuple):
    """What this rank has of a matrix as Hugging Face has it."""

    name: str
    shape: tuple[int, int]
    """(out, in) of the whole matrix."""
    runs: tuple[tuple[int, int], ...]
    """(first, number) of consecutive rows of the parameter; none: this rank has no part of it."""
    bounds: tuple[int, int]
    """[start, stop) of this rank's part along the dimension that is cut."""


@dataclasses.dataclass(frozen=True, eq=False)
class Weight:
    """A parameter of this rank."""

    parameter: torch.nn.Parameter
    name: str
    """The same in every layout, and of no other parameter of the model."""
    dim: int | None
    """Dimension that tensor-parallel ranks cut; None: they hold the same."""
    parts: tuple[Part, ...] = ()
    """None: no matrix, or one that AdamW updates."""
    layer: int = -1
    """In the whole model; of matrices."""
    num_stacked: int = 1
    """Tensors of the same size, each cut by itself, that the shard has one after the other."""
    is_padded: bool = False
    """Its number of rows depends on the layout, as a vocabulary's does."""
    is_copy: bool = False
    """Another parameter of this name counts."""


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """What one rank owns of a parameter: all of it, or some rows of a vocabulary's."""

    weight: Weight
    index: int = 0
    count: int = 1
    """Pieces of the parameter, of the same number of rows."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of this piece of a tensor of the parameter's shape."""
        return tensor if self.count == 1 else tensor.chunk(self.count)[self.index]


def pieces_of(weights: Sequence[Weight], num_replicas: int) -> list[Piece]:
    """Cut what is large and no matrix, so that no rank has to own an embedding by itself."""
    found = []
    for weight in weights:
        rows = weight.parameter.shape[0]
        count = num_pieces(rows, num_replicas) if weight.is_padded else 1
        found += [Piece(weight, index, count) for index in range(count)]
    return found


def rows_of(tensor: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Return rows of a tensor: a view of one run, a copy of several."""
    if len(runs) == 1:
        return tensor.narrow(0, *runs[0])
    return torch.cat([tensor.narrow(0, *run) for run in runs]) if runs else tensor[:0]


def put_rows(tensor: Tensor, runs: Sequence[tuple[int, int]], rows: Tensor) -> None:
    """Write back what rows_of has copied."""
    if len(runs) > 1:
        for run, own in zip(runs, rows.split([count for _, count in runs]), strict=True):
            tensor.narrow(0, *run).copy_(own)


def initial_basis(part: Part, rank: int, seed: int) -> Tensor:
    """Draw this rank's rows of a normal matrix [n, rank], which no layout changes; float32.

    Args:
        part: its bounds say which rows, and its name and the seed what they are.
        rank: of the basis.
        seed: of the run.
    """
    start, stop = part.bounds
    first = start // BASIS_ROWS
    blocks = [torch.empty(0, rank)]
    for block in range(first, math.ceil(stop / BASIS_ROWS)):
        key = hashlib.sha256(f"{seed} {part.name} {block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        blocks.append(torch.randn(BASIS_ROWS, rank, generator=generator))
    return torch.cat(blocks)[start - first * BASIS_ROWS :][: stop - start].clone()

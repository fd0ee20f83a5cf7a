"""Does a resharding plan fit the live weights? Every element of the sampler's, exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vapo_megatron.weights.reshard.plan import Move, Slice
from vapo_megatron.weights.reshard.transfer import Weights


class LiveWeight(NamedTuple):
    """A weight of the sampler, where it lies."""

    tensor: Tensor
    padding_rows: int
    """Last rows that belong to no token; they are to be 0."""


def destination_problems(
    moves: Iterable[Move], weights: Mapping[str, LiveWeight], dtype: torch.dtype
) -> list[str]:
    """Say what is wrong with the moves into one rank's weights; empty: nothing.

    Args:
        moves: all that the rank receives or copies.
        weights: all that it holds, by name.
        dtype: that all must have.
    """
    parts: dict[str, list[Slice]] = {}
    for move in moves:
        parts.setdefault(move.destination.parameter, []).append(move.destination)
    problems = [f"{name} is not in the sampler" for name in parts if name not in weights]
    for name, weight in weights.items():
        if weight.tensor.dtype != dtype:
            problems.append(f"{name} is {weight.tensor.dtype}, not {dtype}")
        elif weight.tensor.dim() > 2:
            problems.append(f"{name} has {weight.tensor.dim()} dimensions, more than 2")
        else:
            rows, columns = _size(weight.tensor)
            if problem := _uncovered(parts.get(name, []), rows - weight.padding_rows, columns):
                problems.append(f"{name} {problem}")
    return problems


def source_problems(moves: Iterable[Move], weights: Weights) -> list[str]:
    """Say which of the moves out of one rank do not lie within its parameters.

    Args:
        moves: all that the rank sends or copies.
        weights: its parameters.
    """
    problems = []
    for move in moves:
        part = move.source
        tensor = weights.get((part.chunk, part.parameter))
        if tensor is None:
            problems.append(f"{part.parameter} is not in chunk {part.chunk} to be sent")
        elif not _within(part, *_size(tensor)):
            problems.append(f"{part} to be sent is not within {tuple(tensor.shape)}")
    return problems


def _uncovered(parts: list[Slice], rows: int, columns: int) -> str:
    """Say how rectangles fail to be a partition of a matrix; empty: they do not fail."""
    for part in parts:
        if not _within(part, rows, columns):
            return f"of [{rows}, {columns}] without padding does not hold {part}"
    parts = sorted(parts, key=lambda p: p.row)
    for i, part in enumerate(parts):
        for other in parts[i + 1 :]:
            if other.row >= part.row + part.rows:
                break
            if part.column < other.column + other.columns and (
                other.column < part.column + part.columns
            ):
                return f"is written twice by {part} and {other}"
    covered = sum(part.rows * part.columns for part in parts)
    if covered != rows * columns:
        return f"gets {covered} of its {rows * columns} elements"
    return ""


def _within(part: Slice, rows: int, columns: int) -> bool:
    return (
        0 <= part.row <= part.row + part.rows <= rows
        and 0 <= part.column <= part.column + part.columns <= columns
    )


def _size(tensor: Tensor) -> tuple[int, int]:
    """Return rows and columns; a vector is one column."""
    return tensor.shape[0], tensor.shape[1] if tensor.dim() == 2 else 1

"""Checks a weight sync: does the plan fit the live weights, and are they equal afterwards?

A plan fits if it writes every element of the engine's weights exactly once. Equality is checked by
checksums: for each move (a relay's source is covered by a move of its own) both ends compute

    sum over i of bits[i] * (i * c | 1)  mod 2^64,    i: position in the slice, row by row,

with c odd. Every factor is odd, so one wrong element always changes the sum; so does the order.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vapo_megatron.weights.reshard.plan import LiveWeight, Move, Plan, Slice
from vapo_megatron.weights.reshard.transfer import Weights, view_of

_FACTOR = 0x9E3779B97F4A7C15 - 2**64
_BLOCK_ELEMENTS = 1 << 22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def destination_problems(
    moves: Iterable[Move], weights: Mapping[str, LiveWeight], dtype: torch.dtype
) -> list[str]:
    """List what is wrong with the moves into one rank's weights.

    Args:
        moves: all that the rank receives or copies.
        weights: the rank's, by name.
        dtype: required of all of them.
    """
    parts: dict[str, list[Slice]] = {}
    for move in moves:
        parts.setdefault(move.destination.parameter, []).append(move.destination)
    problems = [f"{name} is not in the engine" for name in parts if name not in weights]
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
    """List moves from one rank that are not within its parameters.

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
    """Return why slices are not a partition of a matrix; "" if they are."""
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
    covered = sum(part.num_elements for part in parts)
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


def checksum(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the int64 [] checksum of a matrix after rounding it to `dtype`.

    Args:
        matrix: any strides; a few million elements at a time are widened to int64.
        dtype: of the bits that are summed.
    """
    total = torch.zeros((), dtype=torch.int64, device=matrix.device)
    rows = max(1, _BLOCK_ELEMENTS // max(1, matrix.shape[1]))
    for first in range(0, matrix.shape[0], rows):
        block = matrix[first : first + rows].to(dtype).contiguous().flatten()
        bits = block.view(_BITS[dtype.itemsize]).to(torch.int64)
        start = first * matrix.shape[1]
        position = torch.arange(start, start + len(bits), device=matrix.device)
        total += (bits * (position * _FACTOR | 1)).sum()
    return total


@torch.no_grad()
def differences(
    plan: Plan,
    rank: int,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    group: ProcessGroup | None = None,
) -> list[str]:
    """List this rank's engine weights that differ from the trainer's. Collective over all ranks.

    Sends 8 bytes per move.

    Args:
        plan: of the sync.
        rank: this one.
        weights, dtype, device, group: as for transfer.execute.

    Returns:
        One sentence for each slice that differs, naming its parameter.
    """
    received, everyone = plan.received(rank), range(plan.world_size)
    copies = [move for move in received if move.source_rank == rank]
    # Sorting is stable, so both ends of a pair of ranks list their moves in the plan's order.
    incoming = sorted(received, key=lambda m: m.source_rank)
    outgoing = sorted(copies + plan.sent(rank), key=lambda m: m.destination_rank)
    sources = collections.Counter(m.source_rank for m in incoming)
    destinations = collections.Counter(m.destination_rank for m in outgoing)
    sent = [checksum(view_of(weights, m.source), dtype) for m in outgoing]
    found = [checksum(view_of(weights, m.destination), dtype) for m in incoming]
    expected = torch.empty(len(incoming), dtype=torch.int64, device=device)
    dist.all_to_all_single(
        expected,
        _stacked(sent, device),
        [sources[other] for other in everyone],
        [destinations[other] for other in everyone],
        group=group,
    )
    wrong = (_stacked(found, device) != expected).tolist()
    return [_named(move) for move, is_wrong in zip(incoming, wrong, strict=True) if is_wrong]


def _stacked(values: list[Tensor], device: torch.device) -> Tensor:
    if not values:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.stack([value.to(device) for value in values])


def _named(move: Move) -> str:
    part = move.destination
    return (
        f"{part.parameter}, rows {part.row} to {part.row + part.rows - 1}, columns {part.column} "
        f"to {part.column + part.columns - 1}, from rank {move.source_rank}"
    )

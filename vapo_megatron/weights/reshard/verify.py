"""Compares the sampler's live weights with the trainer's, without moving any of them.

For each move of a resharding plan (a relay's source is a sampler's weight, which a move of its own
vouches for) both ends compute a checksum of what they hold,

    sum over i of bits[i] * (i * c | 1)  mod 2^64,    i: position in the rectangle, row by row,

with c odd. Every weight is odd, so one wrong element always changes the sum; order matters.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.weights.reshard.plan import Move, Plan
from vapo_megatron.weights.reshard.transfer import Weights, rectangle

_FACTOR = 0x9E3779B97F4A7C15 - 2**64
_BLOCK_ELEMENTS = 1 << 22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the int64 [] checksum of a matrix after rounding it to `dtype`.

    Args:
        matrix: any strides; a few million elements at a time are widened to int64.
        dtype: whose bits count.
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
) -> list[str]:
    """List this rank's sampler weights that differ from the trainer's. Collective over all ranks.

    Eight bytes are sent for each move.

    Args:
        plan: by which the weights were sent.
        rank: this one.
        weights, dtype, device: as for transfer.carry_out.

    Returns:
        One sentence for each rectangle that differs, naming its parameter.
    """
    outgoing: list[list[Move]] = [[] for _ in range(plan.world_size)]
    incoming: list[list[Move]] = [[] for _ in range(plan.world_size)]
    for move in plan.received(rank):
        incoming[move.source_rank].append(move)
        if move.source_rank == rank:
            outgoing[rank].append(move)
    for move in plan.sent(rank):
        outgoing[move.destination_rank].append(move)
    sent = [checksum(rectangle(weights, m.source), dtype) for moves in outgoing for m in moves]
    flat = [move for moves in incoming for move in moves]
    received = [checksum(rectangle(weights, m.destination), dtype) for m in flat]
    expected = torch.empty(len(flat), dtype=torch.int64, device=device)
    dist.all_to_all_single(
        expected,
        _stacked(sent, device),
        [len(moves) for moves in incoming],
        [len(moves) for moves in outgoing],
    )
    wrong = (_stacked(received, device) != expected).tolist()
    return [_named(move) for move, is_wrong in zip(flat, wrong, strict=True) if is_wrong]


def _stacked(values: list[Tensor], device: torch.device) -> Tensor:
    return torch.stack(values) if values else torch.empty(0, dtype=torch.int64, device=device)


def _named(move: Move) -> str:
    part = move.destination
    return (
        f"{part.parameter}, rows {part.row} to {part.row + part.rows - 1}, columns {part.column} "
        f"to {part.column + part.columns - 1}, from rank {move.source_rank}"
    )

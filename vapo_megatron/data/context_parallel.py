"""Which tokens of a packed forward pass each context-parallel rank holds.

Zig-zag, sequence by sequence: a sequence's length is a multiple of 2 * cp_size and is cut into that
many chunks of equal length; rank r holds chunks r and 2 * cp_size - 1 - r, in this order. An early
chunk attends to little and a late one to much, so that each rank has the same number of tokens and
of causal attention pairs of every sequence. Transformer Engine's attention over packed sequences
makes the same cut with a function of its own, which models/partition.py calls.

Every rank's tokens, one rank after the other, are called the ranks' order; S is their number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Partition = Callable[[Tensor, int, int, int], Tensor]
"""rows_of_rank, or another function with its arguments, result and cut."""


def rows_of_rank(cu_seqlens: Tensor, size: int, cp_size: int, cp_rank: int) -> Tensor:
    """Return int64 [S / cp_size]: which of the packed tokens a rank holds, in its order.

    Args:
        cu_seqlens: int32 [sequences + 1], from 0 to S; every length is a multiple of 2 * cp_size.
        size: S. Given, so that nothing is read back from a device.
        cp_size, cp_rank: how many ranks share each sequence, and which of them.
    """
    starts = cu_seqlens.long() // cp_size
    own = torch.arange(size // cp_size, device=cu_seqlens.device)
    sequence = torch.searchsorted(starts[1:], own, right=True)
    start, chunk = starts[sequence], (starts.diff() // 2)[sequence]
    is_late = own - start >= chunk
    chunks_before = torch.where(is_late, 2 * cp_size - 2 - cp_rank, cp_rank)
    return own + start * (cp_size - 1) + chunks_before * chunk


def ranks_order(
    cu_seqlens: Tensor, size: int, cp_size: int, partition: Partition = rows_of_rank
) -> Tensor:
    """Return int64 [S]: which of the packed tokens stands at each place in the ranks' order.

    Arguments as for rows_of_rank, and the function that cuts. Rank r's are the r-th chunk.
    """
    return torch.cat([partition(cu_seqlens, size, cp_size, rank) for rank in range(cp_size)])


def places_of_tokens(order: Tensor) -> Tensor:
    """Return int64 [S]: where each of the packed tokens stands in the ranks' order."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places

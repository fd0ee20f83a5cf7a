"""Context parallelism: what its ranks gather from each other.

Before: every context-parallel rank holds the outputs of its own tokens (data/context_parallel.py).
After `gather_tokens`: all of them hold those of whole responses, bit-identical. So advantages,
losses and metrics see whole sequences and are the same with and without context parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vapo_megatron.data.microbatch import Microbatch
from vapo_megatron.parallel.groups import Ranks


def gather_tokens(own: Tensor, microbatch: Microbatch, ranks: Ranks) -> Tensor:
    """Return [T] of a microbatch's response tokens from the [T'] that each rank computes.

    One all-gather of S numbers. The gradient of what is returned must be the same on all
    context-parallel ranks, as of a loss that all of them compute: backward takes each rank's own
    rows of it and communicates nothing.

    Args:
        own: [T'], at microbatch.predicting.
        microbatch: this rank's part, on the device.
        ranks: this rank's place.
    """
    if ranks.cp_size == 1:
        return own
    rows = own.new_zeros(microbatch.tokens.numel()).index_copy(0, microbatch.predicting, own)
    return gather_rows(rows, ranks)[microbatch.outputs]


def gather_rows(own: Tensor, ranks: Ranks) -> Tensor:
    """Return [S] of the [S'] that each context-parallel rank has, one rank after the other.

    The gradient is that of gather_tokens.
    """
    return own if ranks.cp_size == 1 else _Gather.apply(own, ranks.cp_group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.size = group, len(own)
        return all_gather(own, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        start = ctx.group.rank() * ctx.size
        return grad[start : start + ctx.size], None


def all_gather(own: Tensor, group: ProcessGroup) -> Tensor:
    """[n, ...] on each rank of a group -> [ranks * n, ...] on all of them, without a gradient."""
    out = own.new_empty((group.size() * own.size(0), *own.shape[1:]))
    dist.all_gather_into_tensor(out, own.contiguous(), group=group)
    return out


def reduce_scatter(whole: Tensor, group: ProcessGroup) -> Tensor:
    """[ranks * n, ...] on each rank -> [n, ...]: its part of their sum, without a gradient."""
    out = whole.new_empty((whole.size(0) // group.size(), *whole.shape[1:]))
    dist.reduce_scatter_tensor(out, whole.contiguous(), group=group)
    return out

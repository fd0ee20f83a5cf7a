"""What megatron-core's DDP holds of model chunks: gradient buffers, parameters in flight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gradient_buffers(chunks: Sequence[Any]) -> Iterator[Any]:
    """Yield every gradient buffer of DDP-wrapped chunks.

    megatron-core keeps experts' gradients in buffers of their own, because other ranks hold the
    same experts than hold the same dense layers: data_parallel_group says which ranks reduce one.
    """
    for chunk in chunks:
        yield from chunk.buffers
        yield from chunk.expert_parallel_buffers


def fill_gradients_with_nan(chunks: Sequence[Any]) -> None:
    """Make the gradient's norm NaN on all ranks, so that all of them skip the update."""
    for buffer in gradient_buffers(chunks):
        buffer.grad_data.fill_(math.nan)


def gradients_are_finite(chunks: Sequence[Any]) -> Tensor:
    """bool 0-d: are this rank's finished gradients finite?

    The norm alone is not enough: it leaves out what is replicated on another tensor-parallel rank.
    """
    sums = [buffer.grad_data.sum() for buffer in gradient_buffers(chunks)]
    return torch.stack(sums).isfinite().all()


def complete_gradients(chunks: Sequence[Any]) -> None:
    """Gather the shards of each gradient bucket that the distributed optimizer leaves to others.

    Collective over each buffer's ranks.
    """
    for buffer in gradient_buffers(chunks):
        if buffer.ddp_config.use_distributed_optimizer:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()]
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


def wait_for_parameters(chunks: Sequence[Any]) -> None:
    """Gather the updated parameters that overlap_param_gather leaves to the next forward pass.

    Collective over data-parallel ranks; does nothing to chunks without DDP.
    """
    for chunk in chunks:
        settings = getattr(chunk, "ddp_config", None)
        if settings is not None and settings.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)

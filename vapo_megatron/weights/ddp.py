"""What megatron-core's DDP keeps around model chunks: their parameters and gradients, in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.parallel.gradient_buffers import gradient_buffers


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """Return the GPTModel inside DDP and mixed-precision wrappers."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def wait_for_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Gather the updated parameters that overlap_param_gather leaves to the next forward pass.

    Collective over data-parallel ranks; does nothing to chunks without DDP.
    """
    for chunk in chunks:
        settings = getattr(chunk, "ddp_config", None)
        if settings is not None and settings.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)  # type: ignore[operator]


def complete_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Gather the shards of each gradient bucket that the distributed optimizer leaves to others.

    Collective over each buffer's ranks.
    """
    for buffer in gradient_buffers(chunks):
        if buffer.ddp_config.use_distributed_optimizer:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                own = bucket.grad_data.chunk(group.size())[group.rank()]
                dist.all_gather_into_tensor(bucket.grad_data, own, group=group)


class ChunkOfGradients:
    """A model chunk, as far as the name table reads it, with gradients in place of parameters."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        self._model: Any = unwrap(chunk)
        self.decoder = self._model.decoder

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's gradient, float32; 0 of a frozen one."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter.main_grad
            else:
                yield name, torch.zeros_like(parameter, dtype=torch.float32)

"""Full gradients by HF name, whatever the layout: they take the parameters' way through the ranks.

Before: every rank's gradient buffers hold finished gradients of its shards, as
`parallel.schedule.forward_backward` leaves them; with the distributed optimizer only this
data-parallel rank's share of each bucket is finished. During: each bucket is completed in place,
then a bucket of shards at a time is gathered over TP and PP. After: the buffers are complete, which
no optimizer minds; parameters are not touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.weights.gather import BUCKET_BYTES, gather_hf_tensors
from vapo_megatron.weights.mapping import unwrap

if TYPE_CHECKING:
    from vapo_megatron.models.hf_config import ModelShape
    from vapo_megatron.parallel.groups import Ranks


def full_gradients(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    ranks: Ranks,
    role: str,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradient of every HF tensor in full on every rank, before clipping.

    Collective over all ranks: every rank must take all of them, between the backward pass and the
    optimizer's step. A tensor may share the gradient buffers' memory and is valid until they
    change; copy what is to be kept.

    Args:
        chunks: this rank's, with DDP around them.
        shape: of the model.
        ranks: this rank's place.
        role: "actor" or "critic".
        bucket_bytes: a gathered bucket is at most this large, or one parameter: the memory that
            this takes, with one parameter more.

    Yields:
        (HF name, float32), stage by stage; the gradient of a tied embedding is the sum of both of
        its uses, that of a frozen parameter is 0.
    """
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:  # type: ignore[union-attr]
            _complete_buckets(chunk, ranks)
    lent: Any = [_ChunkOfGradients(chunk) for chunk in chunks]
    yield from gather_hf_tensors(lent, shape, ranks, role=role, bucket_bytes=bucket_bytes)


def _complete_buckets(chunk: Any, ranks: Ranks) -> None:
    """Fetch the other data-parallel ranks' shares of each bucket, into their places."""
    for buffer in chunk.buffers:
        for bucket in buffer.buckets:
            own = bucket.grad_data.chunk(ranks.dp_size)[ranks.dp_rank]
            dist.all_gather_into_tensor(bucket.grad_data, own, group=ranks.dp_group)


class _ChunkOfGradients:
    """As much of a model chunk as the name table reads, with each gradient for its parameter."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        self._model = unwrap(chunk)
        self.decoder = self._model.decoder

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter.main_grad  # type: ignore[attr-defined]
            else:
                yield name, torch.zeros_like(parameter, dtype=torch.float32)

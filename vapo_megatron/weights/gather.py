"""Gathers full HF tensors, or their gradients, from Megatron shards on every rank, for checks.

Before: every rank holds its shards. During: a bucket of one pipeline stage's shards is packed into
one buffer, broadcast over the pipeline (among ranks of the same tensor-parallel rank) and gathered
over the tensor-parallel group. After: nothing is kept. If one rank holds the whole model, nothing
is sent.

Gradients are gathered like parameters. Before: gradient buffers hold finished gradients, as
`parallel.schedule.forward_backward` leaves them; with the distributed optimizer only this replica's
shard of each bucket is finished, and the others are gathered into it. After: the buffers are
complete, which does not affect the optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.parallel.gradient_buffers import complete_gradients, wait_for_parameters
from vapo_megatron.weights import layout
from vapo_megatron.weights.adapter_table import adapter_tensors
from vapo_megatron.weights.holders import HOLDERS, expert_shifts
from vapo_megatron.weights.parameters import LocalParameter, local_parameters, unwrap
from vapo_megatron.weights.table import Kind, hf_tensors, shift_expert

if TYPE_CHECKING:
    from vapo_megatron.config.lora import LoraConfig
    from vapo_megatron.models.hf_config import ModelShape
    from vapo_megatron.parallel.groups import Ranks

BUCKET_BYTES = 512 << 20


@dataclasses.dataclass(frozen=True)
class _Shard:
    """Description of a parameter, known to every rank."""

    hf_names: tuple[str, ...]
    kind: Kind
    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: str = "tp"
    """Of the ranks that hold the other shards or, where they hold other experts, those."""
    shifts: tuple[int, ...] = (0,)
    """See expert_shifts: one for each of these ranks, or one for all that hold shards."""

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    def names(self, shift: int) -> list[str]:
        """Return its names on a rank with other experts."""
        return [shift_expert(name, shift) for name in self.hf_names]


def gather_hf_tensors(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    ranks: Ranks,
    *,
    role: str = "actor",
    lora: LoraConfig | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every HF tensor in full on every rank, adapters merged, without the padding.

    Collective over tp_group and pp_group: every rank must consume all of them. A tensor may share
    the model's memory and is valid until the next update; copy it to keep it.

    Args:
        chunks: this rank's model chunks; with DDP around them, parameters that overlap_param_gather
            has not fetched yet are fetched first.
        role: "actor" or "critic".
        lora: yield the matrices of the adapters in place of the model's.
        bucket_bytes: largest gathered bucket, unless one parameter is larger. Peak memory is about
            one bucket, its shards and one parameter.

    Yields:
        (HF name, tensor of the parameter's type), stage by stage.
    """
    wait_for_parameters(chunks)
    parameters = [p for p in local_parameters(chunks, shape, role, lora) if not p.row.is_copy]
    mine = [_described(p, shape, ranks) for p in parameters]
    stages = _all_stages(mine, ranks)
    found = sorted(
        name
        for stage in stages
        for shard in stage
        for shift in shard.shifts
        for name in shard.names(shift)
    )
    whole = hf_tensors(shape, role) if lora is None else adapter_tensors(shape, lora)
    assert found == sorted(whole), "the stages do not add up to the model"
    for stage, shards in enumerate(stages):
        for start, stop in _buckets(shards, bucket_bytes // max(ranks.tp_size, ranks.ep_size)):
            bucket = shards[start:stop]
            local = [p.merged for p in parameters[start:stop]] if stage == ranks.pp_rank else []
            per_rank = _gather(bucket, local, stage, ranks, parameters[0].data.device)
            for shard, parts in zip(bucket, zip(*per_rank, strict=True), strict=True):
                # Each expert is whole on its rank.
                count = len(parts) // len(shard.shifts)
                for i, shift in enumerate(shard.shifts):
                    full = layout.join(
                        shard.kind,
                        parts[i * count : (i + 1) * count],
                        num_groups=shape.num_key_value_heads,
                        head_dim=shape.head_dim,
                        num_rows=shape.vocab_size,
                    )
                    yield from zip(shard.names(shift), full, strict=True)


def _described(parameter: LocalParameter, shape: ModelShape, ranks: Ranks) -> _Shard:
    row, data = parameter.row, parameter.data
    cut, spread = HOLDERS[row.holder]
    shifts, names = tuple(expert_shifts(row, shape, ranks)), parameter.hf_names
    return _Shard(names, row.kind, tuple(data.shape), data.dtype, spread or cut, shifts)


def _all_stages(mine: list[_Shard], ranks: Ranks) -> list[list[_Shard]]:
    """Return what every pipeline stage holds, in stage order."""
    if ranks.pp_size == 1:
        return [mine]
    stages: list[Any] = [None] * ranks.pp_size
    dist.all_gather_object(stages, mine, group=ranks.pp_group)
    return stages


def _buckets(shards: list[_Shard], limit_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of consecutive shards of one type and axis that fit the limit."""
    start = used = 0
    for i, shard in enumerate(shards):
        size = shard.num_elements * shard.dtype.itemsize
        first = shards[start]
        is_other = (shard.dtype, shard.axis) != (first.dtype, first.axis)
        if i > start and (used + size > limit_bytes or is_other):
            yield start, i
            start, used = i, 0
        used += size
    if shards:
        yield start, len(shards)


def _gather(
    bucket: list[_Shard],
    local: list[Tensor],
    stage: int,
    ranks: Ranks,
    device: torch.device,
) -> list[list[Tensor]]:
    """Return the bucket's shards of each rank on their axis; `local`: this rank's, on `stage`."""
    axis = ranks.axes[bucket[0].axis]
    if axis.size == ranks.pp_size == 1:
        return [local]
    sizes = [s.num_elements for s in bucket]
    buffer = torch.empty(sum(sizes), dtype=bucket[0].dtype, device=device)
    for target, source in zip(buffer.split(sizes), local, strict=False):
        target.copy_(source.reshape(-1))
    if ranks.pp_size > 1:
        dist.broadcast(buffer, group=ranks.pp_group, group_src=stage)
    everyone = buffer
    if axis.size > 1:
        everyone = buffer.new_empty(axis.size * buffer.numel())
        dist.all_gather_into_tensor(everyone, buffer, group=axis.group)
    return [
        [flat.view(s.shape) for flat, s in zip(row.split(sizes), bucket, strict=True)]
        for row in everyone.chunk(axis.size)
    ]


def full_gradients(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    ranks: Ranks,
    role: str,
    *,
    lora: LoraConfig | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradient of every HF tensor in full on every rank, before clipping.

    Collective over all ranks: every rank must consume all of them, between the backward pass and
    the optimizer's step. A tensor may share the gradient buffers' memory and is valid until they
    change; copy it to keep it.

    Args:
        chunks: this rank's, with DDP around them.
        role, lora, bucket_bytes: see gather_hf_tensors.

    Yields:
        (HF name, float32), stage by stage. A tied embedding's gradient is the sum over both uses, a
        frozen parameter's is 0.
    """
    complete_gradients(chunks)
    gradients: Any = [_ChunkOfGradients(chunk) for chunk in chunks]
    yield from gather_hf_tensors(
        gradients, shape, ranks, role=role, lora=lora, bucket_bytes=bucket_bytes
    )


class _ChunkOfGradients:
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

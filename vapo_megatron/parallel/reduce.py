"""Small reductions over ranks: counts, metrics, results of the last pipeline stage.

Before: each rank holds its own numbers. After: the ranks that the function names hold the same.
Tensors may be on the CPU or on the device; results are returned there. Every function is a
collective: all ranks of its group call it, in the same order, with equal shapes and keys.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vapo_megatron.parallel import backend

if TYPE_CHECKING:
    from vapo_megatron.parallel.groups import Ranks

T = TypeVar("T")
Metrics = TypeVar("Metrics", Tensor, dict[str, Tensor])


def sum_over_data_parallel(value: Metrics, ranks: Ranks) -> Metrics:
    """Sum a tensor, or each 0-d tensor of a dict, over the data-parallel ranks.

    Args:
        value: a tensor of any shape, or a dict with the same keys on all data-parallel ranks, which
            takes one float64 all-reduce, in the order of its sorted keys.
        ranks: this rank's place.

    Returns:
        A new tensor or dict, the same on all data-parallel ranks.
    """
    if isinstance(value, Tensor):
        return _all_reduce(value, dist.ReduceOp.SUM, ranks.dp_group)
    if ranks.dp_size == 1 or not value:
        return dict(value)
    names = sorted(value)
    stacked = torch.stack([value[name].detach().double() for name in names])
    sums = _all_reduce(stacked, dist.ReduceOp.SUM, ranks.dp_group)
    return {name: total.to(value[name].dtype) for name, total in zip(names, sums.unbind())}


def sum_over_context_parallel(value: Tensor, ranks: Ranks) -> Tensor:
    """Sum a tensor over the ranks that share the same sequences."""
    return value if ranks.cp_size == 1 else _all_reduce(value, dist.ReduceOp.SUM, ranks.cp_group)


def sum_over_world(value: Tensor) -> Tensor:
    """Sum a tensor over all ranks."""
    return _all_reduce(value, dist.ReduceOp.SUM, dist.group.WORLD)


def max_over_world(value: Tensor) -> Tensor:
    """Take the elementwise maximum of a tensor over all ranks; NaN on one rank is NaN on all."""
    reduced = _all_reduce(
        torch.stack([value.masked_fill(value.isnan(), -torch.inf), value.isnan().to(value.dtype)]),
        dist.ReduceOp.MAX,
        dist.group.WORLD,
    )
    return reduced[0].masked_fill(reduced[1] > 0, torch.nan)


def any_rank(flag: bool) -> bool:
    """Does it hold on any rank? The same answer on all, in one all-reduce."""
    return bool(_all_reduce(torch.tensor(float(flag)), dist.ReduceOp.MAX, dist.group.WORLD))


def gather_objects(value: T, group: ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, by rank; without process groups, this process's alone.

    group: whose ranks; None: the world's.
    """
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_objects_on(destination: int, value: T, group: ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, by rank, on one rank of the group; on the others an empty list.

    For what is too large to be gathered by every rank, and of different size on each: nothing is
    padded.
    """
    if not dist.is_initialized():
        return [value]
    group = group or dist.group.WORLD
    assert group is not None
    out = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = gather_objects(len(out), group)
    receives, sends = ([0] * group.size() for _ in range(2))
    sends[destination] = len(out)
    if group.rank() == destination:
        receives = sizes
    into = torch.empty(sum(receives), dtype=torch.uint8, device=backend.device())
    dist.all_to_all_single(into, out.to(backend.device()), receives, sends, group=group)
    if group.rank() != destination:
        return []
    return [pickle.loads(part.numpy().tobytes()) for part in into.cpu().split(receives)]


def broadcast_from_last_stage(
    results: Sequence[Tensor], lengths: Sequence[int], ranks: Ranks
) -> list[Tensor]:
    """Send the last pipeline stage's results to the other stages of the same pipeline.

    Two broadcasts, whatever the number of results; none without a pipeline.

    Args:
        results: on the last stage one float32 tensor [length] or [length, width] for each length,
            all of the same width; ignored elsewhere.
        lengths: first size of each result, known on every stage.
        ranks: this rank's place.

    Returns:
        The results, on the device.
    """
    if ranks.is_last_stage:
        assert [len(r) for r in results] == list(lengths), "one row for each token or response"
    if ranks.pp_size == 1 or not lengths:
        return list(results)
    shape = torch.zeros(1, dtype=torch.long, device=backend.device())
    if ranks.is_last_stage and results[0].dim() == 2:
        shape.fill_(results[0].shape[1])
    dist.broadcast(shape, ranks.last_stage_rank, group=ranks.pp_group)
    width = int(shape)
    if ranks.is_last_stage:
        flat = torch.cat(list(results))
    else:
        size = (sum(lengths), width) if width else (sum(lengths),)
        flat = torch.empty(size, dtype=torch.float32, device=backend.device())
    dist.broadcast(flat, ranks.last_stage_rank, group=ranks.pp_group)
    return list(flat.split(list(lengths)))


def broadcast_metrics_from_last_stage(
    metrics: dict[str, Tensor], ranks: Ranks
) -> dict[str, Tensor]:
    """Send a dict of 0-d tensors from the last pipeline stage to the other stages, float64.

    Nothing is sent, and nothing converted, without a pipeline.
    """
    if ranks.pp_size == 1:
        return metrics
    payload = [{name: float(value) for name, value in metrics.items()}]
    dist.broadcast_object_list(
        payload, ranks.last_stage_rank, group=ranks.pp_group, device=backend.device()
    )
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in payload[0].items()}


def _all_reduce(value: Tensor, operation: dist.ReduceOp.RedOpType, group: object) -> Tensor:
    """Reduce a copy on the device; return it where the value was."""
    copy = value.detach().to(backend.device(), copy=True)
    dist.all_reduce(copy, operation, group=group)
    return copy.to(value.device)

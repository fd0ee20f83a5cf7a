"""Two worlds in one torchrun: trainers and rollout workers, and the group that joins them.

With rollout.placement=disaggregated the first processes train and the others generate rollouts.
Each set is its own torch.distributed world: megatron-core and vLLM count its ranks from 0 and see
no others. `Worlds.group` has all processes, by torchrun's ranks.

The group is built by hand, because torch.distributed only creates groups within its default world.
Functions that need no global ranks accept it: all_reduce, all_gather_into_tensor,
all_to_all_single, all_gather_object and barrier, but not broadcast and isend.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


@dataclasses.dataclass(frozen=True)
class Worlds:
    """This process's place among all processes; ranks are torchrun's."""

    rank: int
    num_trainers: int
    num_rollout_workers: int
    group: ProcessGroup
    """Joins all processes: messages on the CPU by gloo, on GPUs by NCCL."""

    @property
    def world_size(self) -> int:
        """Processes of both worlds."""
        return self.num_trainers + self.num_rollout_workers

    @property
    def is_rollout_worker(self) -> bool:
        """Whether this process generates rollouts."""
        return self.rank >= self.num_trainers

    @property
    def rollout_workers(self) -> range:
        """Ranks of the rollout workers."""
        return range(self.num_trainers, self.world_size)

    def close(self) -> None:
        """Destroy the joint group on this process; destroy_process_group does not know it."""
        self.group.shutdown()
        known = dist.distributed_c10d._world
        known.pg_map.pop(self.group, None)
        known.pg_group_ranks.pop(self.group, None)


def split(
    store: dist.Store,
    rank: int,
    world_size: int,
    num_rollout_workers: int,
    timeout: datetime.timedelta,
) -> Worlds:
    """Initialize this process's world and the group that joins both. Collective over all processes.

    Args:
        store: joined by all processes.
        rank, world_size: of this process among all, and their number.
        num_rollout_workers: the last of the processes.
        timeout: of a collective.
    """
    num_trainers = world_size - num_rollout_workers
    assert num_trainers >= 1 and num_rollout_workers >= 1, (
        f"{num_rollout_workers} of {world_size} sample"
    )
    is_rollout_worker = rank >= num_trainers
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        store=dist.PrefixStore("rollout_worker" if is_rollout_worker else "trainer", store),
        rank=rank - num_trainers if is_rollout_worker else rank,
        world_size=num_rollout_workers if is_rollout_worker else num_trainers,
        timeout=timeout,
    )
    group = dist.ProcessGroup(dist.PrefixStore("joint", store), rank, world_size)
    kind = None
    for device, kind, backend in _backends(store, rank, world_size, timeout):
        backend._set_sequence_number_for_group()
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)  # type: ignore[arg-type]
    # torch looks groups up here for its error messages; without it, it reports an unknown group.
    known = dist.distributed_c10d._world
    known.pg_map[group] = (dist.get_backend(), store)
    known.pg_group_ranks[group] = {dist.get_rank(): rank}
    return Worlds(rank, num_trainers, num_rollout_workers, group)


def _backends(
    store: dist.Store, rank: int, world_size: int, timeout: datetime.timedelta
) -> Iterator[tuple[str, ProcessGroup.BackendType, Any]]:
    """Yield (device, kind, backend): gloo for the CPU and, with GPUs, NCCL, which is the last."""
    own = dist.PrefixStore("joint/cpu", store)
    gloo = dist.ProcessGroupGloo(own, rank, world_size, timeout=timeout)
    yield "cpu", ProcessGroup.BackendType.GLOO, gloo
    if torch.cuda.is_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        own = dist.PrefixStore("joint/cuda", store)
        nccl = dist.ProcessGroupNCCL(own, rank, world_size, options)
        yield "cuda", ProcessGroup.BackendType.NCCL, nccl

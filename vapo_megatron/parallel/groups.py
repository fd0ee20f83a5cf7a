"""The process groups of this rank: the only reader of megatron-core's `parallel_state`.

Before `initialize`: torch.distributed runs, with one process per rank. After it: every rank belongs
to one tensor-parallel, one context-parallel, one pipeline-parallel and one data-parallel group.
Ranks are numbered tensor parallel fastest, then context parallel, then data parallel, then
pipeline: with TP=2, DP=2, PP=2, ranks 0 and 1 share each layer's matrices, 0 and 2 are replicas of
each other, and 0 and 4 are the stages of one pipeline. With CP=2 in DP's place, ranks 0 and 2 hold
the same weights too, and share each sequence.

The ranks of one data-parallel rank, TP x CP x PP of them, train on the same responses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup

from vapo_megatron.config import ParallelConfig
from vapo_megatron.errors import ConfigError

AXES: dict[str, Callable[[], ProcessGroup]] = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "dp": parallel_state.get_data_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "replica": partial(parallel_state.get_data_parallel_group, with_context_parallel=True),
    "ep": parallel_state.get_expert_model_parallel_group,
    "etp": parallel_state.get_expert_tensor_parallel_group,
    "edp": parallel_state.get_expert_data_parallel_group,
}
"""Which of megatron-core's groups each axis is. On "replica", CP x DP, are the ranks with the same
parameters, which reduce gradients and share the optimizer; replica_rank is cp_rank + cp_size *
dp_rank. On "ep" are those with different experts, on "edp" those with the same ones, on "etp" this
rank alone: experts are not cut."""


class Axis(NamedTuple):
    """Where a rank stands on one axis."""

    size: int
    rank: int
    """In the group."""
    group: ProcessGroup


def _served(axis: str) -> tuple[int, int, ProcessGroup]:
    """Return properties of Ranks that read an axis; typed as what they return."""

    def read(field: str) -> Any:
        return property(lambda ranks: getattr(ranks.axes[axis], field))

    return read("size"), read("rank"), read("group")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Where this rank stands on each axis."""

    rank: int
    world_size: int
    axes: Mapping[str, Axis]
    """By the names in AXES."""
    vpp_size: int
    """Model chunks on each pipeline rank, 1 when the pipeline is not virtual."""
    last_stage_rank: int
    """Global rank of the member of pp_group that holds the last stage."""

    tp_size, tp_rank, tp_group = _served("tp")
    pp_size, pp_rank, pp_group = _served("pp")
    dp_size, dp_rank, dp_group = _served("dp")
    cp_size, cp_rank, cp_group = _served("cp")
    replica_size, replica_rank, replica_group = _served("replica")
    ep_size, ep_rank, ep_group = _served("ep")
    etp_size, etp_rank, etp_group = _served("etp")
    edp_size, edp_rank, edp_group = _served("edp")

    @property
    def is_first_stage(self) -> bool:
        """Does this rank hold the embedding (in its first chunk)?"""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Does this rank hold the output (in its last chunk)?"""
        return self.pp_rank == self.pp_size - 1


_current: Ranks | None = None


def initialize(parallel: ParallelConfig, seed: int = 0) -> Ranks:
    """Build every process group and seed megatron-core's RNG tracker. Collective over all ranks.

    Args:
        parallel: the layout; its world_size must be that of torch.distributed.
        seed: of the tracker; tensor-parallel ranks get different streams from it.

    Raises:
        ConfigError: parallel.world_size is not the number of processes that run.
    """
    global _current
    assert _current is None, "groups.initialize was called twice; call groups.destroy() in between"
    if dist.get_world_size() != parallel.world_size:
        raise ConfigError(
            f"parallel.world_size={parallel.world_size} must be the number of processes started, "
            f"{dist.get_world_size()}; set parallel.world_size, or torchrun's --nproc-per-node "
            "and --nnodes"
        )
    vpp_size = parallel.virtual_pipeline_model_parallel_size or 1
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=vpp_size if vpp_size > 1 else None,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=math.ceil(parallel.timeout_seconds / 60),
    )
    model_parallel_cuda_manual_seed(seed)
    found = {name: group() for name, group in AXES.items()}
    _current = Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        axes={name: Axis(group.size(), group.rank(), group) for name, group in found.items()},
        vpp_size=vpp_size,
        last_stage_rank=dist.get_process_group_ranks(found["pp"])[-1],
    )
    return _current


def current() -> Ranks:
    """Return the groups that `initialize` built."""
    assert _current is not None, "groups.initialize has not been called"
    return _current


def destroy() -> None:
    """Forget the groups, so that `initialize` may be called again. Safe to call at any time."""
    global _current
    parallel_state.destroy_model_parallel()
    _current = None

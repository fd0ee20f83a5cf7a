"""Bytes of host memory on a node, and of a checkpoint on disk, by arithmetic alone.

Counted are what parallel.offload keeps and what checkpoints take; nothing else that a process has.
"""

from __future__ import annotations

from typing import NamedTuple

from vapo_megatron.config import VapoConfig
from vapo_megatron.models.hf_config import ModelShape, padded_vocab_size, parameter_count
from vapo_megatron.planning.memory import offloads, outer_stages
from vapo_megatron.planning.model_bytes import DTYPE_BYTES, chunk_parameters, state_bytes


class HostBytes(NamedTuple):
    """Host memory, of one process or of a node."""

    offloaded: int
    """Parameters and optimizer states of all roles. Gradients are dropped, not kept: they are zero
    between updates."""
    checkpoint: int
    """While one is made or loaded."""

    @property
    def total(self) -> int:
        """Both."""
        return sum(self)


def host_bytes(
    shape: ModelShape,
    config: VapoConfig,
    *,
    pp_rank: int,
    is_first_replica: bool,
    is_offloaded: bool,
) -> HostBytes:
    """Host memory of one process.

    With checkpoint.asynchronous the ranks of the first data-parallel replica copy all roles that
    are trained: parameters, and in float32 Adam's two moments and what the optimizer updates (see
    checkpoint_bytes). The distributed optimizer's state is brought together first, one role after
    the other, and megatron-core leaves it on every rank: get_parameter_state_dp_zero with
    return_on_all_ranks in distrib_optimizer.py.

    Args:
        shape: of the model.
        config: the layout divides the model.
        pp_rank: its stage.
        is_first_replica: is its data-parallel rank 0?
        is_offloaded: see memory.offloads; a run knows whether it has a GPU.
    """
    algorithm = config.algorithm
    offloaded = 0
    if is_offloaded:
        states = [state_bytes(shape, config, role, pp_rank=pp_rank) for role in algorithm.roles]
        offloaded = sum(s.parameters + s.optimizer for s in states)
    copies, gathered = [0], [0]
    for role in algorithm.trained_roles:
        every, learning = (
            chunk_parameters(shape, config, role, pp_rank=pp_rank, learning=only)
            for only in (False, True)
        )
        elements = [sum(map(sum, chunks)) for chunks in (every, learning)]
        size = DTYPE_BYTES[config.model.dtype]
        optimizer = elements[1] * (8 + (4 if _has_main(config) else 0))
        copies.append(elements[0] * size + optimizer)
        gathered.append(optimizer if config.parallel.use_distributed_optimizer else 0)
    copied = sum(copies) if config.checkpoint.asynchronous and is_first_replica else 0
    return HostBytes(offloaded, max(copied, *gathered))


def host_bytes_per_node(shape: ModelShape, config: VapoConfig, *, gpus_per_node: int) -> HostBytes:
    """Host memory of the fullest node: its GPUs all belong to the fullest stage.

    Of these as many are of the first replica as can be: ranks are numbered by tensor-parallel
    rank, then data-parallel rank, then stage.
    """
    parallel = config.parallel
    tp_size, dp_size = parallel.tensor_model_parallel_size, parallel.data_parallel_size
    num_gpus = min(gpus_per_node, parallel.world_size)
    first = min(num_gpus, tp_size * -(-num_gpus // (tp_size * dp_size)))
    found = []
    for stage in outer_stages(config):
        copying, other = (
            host_bytes(
                shape,
                config,
                pp_rank=stage,
                is_first_replica=is_first,
                is_offloaded=offloads(config),
            )
            for is_first in (True, False)
        )
        found.append([first * a + (num_gpus - first) * b for a, b in zip(copying, other)])
    return HostBytes(*max(found, key=sum))


def checkpoint_bytes(shape: ModelShape, config: VapoConfig) -> int:
    """Size on disk of one checkpoint of the whole job: its models and their optimizers.

    Each parameter once, however many ranks hold it: in the model's dtype, and in float32 Adam's two
    moments and what the optimizer updates, the main parameters of bfloat16 models or the
    distributed optimizer's shards. Padding of the vocabulary counts.
    """
    parallel = config.parallel
    tp_size = parallel.tensor_model_parallel_size
    rows = padded_vocab_size(shape, config.model.make_vocab_size_divisible_by, tp_size)
    padding = (rows - shape.vocab_size) * shape.hidden_size
    elements = 0
    if "actor" in config.algorithm.trained_roles:
        elements += parameter_count(shape) + padding * (1 if shape.tied else 2)
    if "critic" in config.algorithm.trained_roles:
        elements += parameter_count(shape, value_head=True) + padding
    return elements * (DTYPE_BYTES[config.model.dtype] + 8 + (4 if _has_main(config) else 0))


def _has_main(config: VapoConfig) -> bool:
    """Does a checkpoint hold what the optimizer updates besides the model's parameters?"""
    return config.parallel.use_distributed_optimizer or DTYPE_BYTES[config.model.dtype] < 4

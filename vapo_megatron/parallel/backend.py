"""This process's device, and the initialization of torch.distributed."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from vapo_megatron.errors import ConfigError
from vapo_megatron.parallel import numa, store, worlds
from vapo_megatron.parallel.environment import CONNECTIONS


def device() -> torch.device:
    """The device that this process computes on: its own GPU (torchrun's LOCAL_RANK), or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def distributed_backend() -> str:
    """Backend of `torch.distributed`: "nccl" with a GPU, else "gloo"."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def initialize_distributed(
    timeout_seconds: float, num_rollout_workers: int = 0
) -> worlds.Worlds | None:
    """Join torchrun's processes, each with its own GPU.

    Args:
        timeout_seconds: of a collective.
        num_rollout_workers: the last processes, which sample for the others; 0: all are one world.

    Returns:
        The two worlds, of which one is this process's; None where there is one.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
        numa.bind_to_gpu(device().index)
    joined, rank, world_size = store.join(timeout_seconds)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if num_rollout_workers:
        return worlds.split(joined, rank, world_size, num_rollout_workers, timeout)
    dist.init_process_group(
        distributed_backend(), store=joined, rank=rank, world_size=world_size, timeout=timeout
    )
    return None


def synchronize() -> None:
    """Wait until the GPU has finished; does nothing on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def check_launch_order(tp_size: int) -> None:
    """Refuse a setting with which tensor-parallel communication would not overlap computation.

    megatron-core launches each layer's communication just before the computation that hides it, and
    relies on kernels running in launch order. From Blackwell on they do without the setting.

    Raises:
        ConfigError: names the variable, its value and what it must be.
    """
    value = os.environ.get(CONNECTIONS)
    if tp_size == 1 or value == "1" or not torch.cuda.is_available():
        return
    if torch.cuda.get_device_capability()[0] < 10:
        raise ConfigError(
            f"environment variable {CONNECTIONS}={value} must be 1 on this GPU with "
            f"parallel.tensor_model_parallel_size={tp_size}; set it to 1, or unset it, before the "
            "start"
        )

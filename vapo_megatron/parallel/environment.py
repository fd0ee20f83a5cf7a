"""Environment variables of a process: torchrun's, and those that CUDA and NCCL read at their start.

`vapo_megatron.parallel` sets the latter when it is imported, unless the user has set them: in the
launcher and in every worker, however it was started.
"""

from __future__ import annotations

import os
from pathlib import Path

from vapo_megatron.errors import ConfigError

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
NVLS = "NCCL_NVLS_ENABLE"

DEFAULTS = {
    # Kernels run in launch order: communication before the computation that hides it.
    CONNECTIONS: "1",
    # NVLink SHARP, the switches' own reductions. From NCCL 2.29 on, which torch 2.13 pins, a
    # communicator fails to start where the switches refuse it or have none of their 128 slots left
    # (NVIDIA/nccl issue 2077); 2.28 went on without. Its sums also differ from call to call (issue
    # 1497). What it costs: 370 instead of 480 GB/s of an all-reduce within 8 H100 (issue 2140).
    NVLS: "0",
}


def set_defaults() -> None:
    """Set each variable of DEFAULTS that is not set yet."""
    for name, default in DEFAULTS.items():
        if value(name) is None:
            os.environ[name] = default


def check_processes(world_size: int, num_samplers: int = 0) -> None:
    """Check the number of processes; without torchrun, set the environment of a single one.

    Args:
        world_size: parallel.world_size.
        num_samplers: rollout.num_processes.

    Raises:
        ConfigError: their sum is not the number of processes started.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != world_size + num_samplers:
        sampling = f" + rollout.num_processes={num_samplers}" if num_samplers else ""
        raise ConfigError(
            f"parallel.world_size={world_size}{sampling} must be the number of "
            f"processes started, {started}; set parallel.world_size="
            f"{max(started - num_samplers, 1)} or torchrun's --nproc-per-node and --nnodes"
        )
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, default in defaults.items():
        os.environ.setdefault(name, default)
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")


def value(name: str) -> str | None:
    """Return a variable's value: the environment's, or else, for NCCL's, its configuration file's.

    Source: NCCL's documentation, "Environment Variables". The environment overrides the files, so a
    default there would override a cluster's own choice.
    """
    if name in os.environ or not name.startswith("NCCL_"):
        return os.environ.get(name)
    users = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    for file in (users, "/etc/nccl.conf"):
        try:
            lines = Path(file).read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith(f"{name}="):
                return line.removeprefix(f"{name}=").strip()
    return None

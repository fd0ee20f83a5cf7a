"""Environment variables: torchrun's, and those that libraries read when they are imported.

`vapo_megatron.parallel` sets the latter when it is imported, unless the user has set them: in the
launcher and in every worker, however it was started, before torch and vLLM are imported.
"""

from __future__ import annotations

import os
import stat
import tempfile
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

WITHOUT_MULTICAST = {
    # vLLM binds multicast memory of its own for a replica's all-reduces, whatever NCCL does:
    # through FlashInfer, and through torch's symmetric memory. Where the switches refuse it, vLLM
    # fails to start, or decodes ten times slower (vllm issues 48071, 47284, 51986, 48075). Its
    # custom all-reduce over NVLink remains; rollout/vllm/arguments.py also turns off the compiled
    # fusion that calls FlashInfer's (issue 50505: all three are needed).
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
"""Defaults while NCCL_NVLS_ENABLE is 0: that variable is the one switch for multicast memory."""

CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "VLLM_CACHE_ROOT": "vllm",
}
"""Where kernels are compiled into, below `cache_directory`. The libraries' own default is the home
directory, which nodes share: hundreds of processes would write the same files over the network, and
read each other's half-written ones (triton issue 11512)."""


def set_defaults() -> None:
    """Set each variable of DEFAULTS, WITHOUT_MULTICAST and CACHES that is not set yet."""
    for name, default in DEFAULTS.items():
        if value(name) is None:
            os.environ[name] = default
    if not has_multicast():
        for name, default in WITHOUT_MULTICAST.items():
            os.environ.setdefault(name, default)
    directory = cache_directory()
    if directory is not None:
        for name, folder in CACHES.items():
            os.environ.setdefault(name, str(directory / folder))


def has_multicast() -> bool:
    """Whether NCCL and vLLM may use NVLink's multicast memory: not while NCCL_NVLS_ENABLE is 0."""
    return value(NVLS) not in (None, "0")


def cache_directory() -> Path | None:
    """Make this user's folder on the node's own disk (TMPDIR), or return None.

    Code is loaded from it, so one that somebody else could write to is not used: the libraries then
    have their own defaults.
    """
    path = Path(tempfile.gettempdir(), f"vapo_megatron-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError:
        return None
    is_own = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return path if is_own and stat.S_ISDIR(found.st_mode) else None


def check_processes(world_size: int, num_rollout_workers: int = 0) -> None:
    """Check the number of processes; without torchrun, set the environment of a single one.

    Args:
        world_size: parallel.world_size.
        num_rollout_workers: rollout.num_processes.

    Raises:
        ConfigError: their sum is not the number of processes started.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != world_size + num_rollout_workers:
        sampling = f" + rollout.num_processes={num_rollout_workers}" if num_rollout_workers else ""
        raise ConfigError(
            f"parallel.world_size={world_size}{sampling} must be the number of "
            f"processes started, {started}; set parallel.world_size="
            f"{max(started - num_rollout_workers, 1)} or torchrun's --nproc-per-node and --nnodes"
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

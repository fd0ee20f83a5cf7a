"""Environment variables that CUDA and NCCL read when they start, set unless the user has set them.

`vapo_megatron.parallel` sets them when it is imported: in the launcher and in every worker, however
it was started.
"""

from __future__ import annotations

import os
from pathlib import Path

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

"""Restores what vLLM changes in the trainer's process."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Restore the environment, thread setter and matmul precision after building the engine.

    VLLM_* variables that the body adds stay: vLLM reads them later.
    """
    environment = dict(os.environ)
    set_num_threads, precision = torch.set_num_threads, torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        for name in set(os.environ) - set(environment):
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update(environment)
        torch.set_num_threads = set_num_threads
        torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random states, which vLLM seeds and draws from."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def name_run() -> str:
    """Return a name for vLLM's shared memory that no other run on the machine has. Collective."""
    name = [os.urandom(8).hex()]
    dist.broadcast_object_list(name, src=0)
    return name[0]


def unlink_shared_memory(run_name: str, first_rank: int, tp_size: int) -> None:
    """Unlink the memory that a replica's ranks share on a CPU; their mappings stay valid.

    vLLM never does, so a killed run would leak it.
    """
    ranks = "-".join(str(first_rank + i) for i in range(tp_size))
    for file in Path("/dev/shm").glob(f"{run_name}-*"):
        if f"[{ranks}]" in file.name:
            file.unlink(missing_ok=True)

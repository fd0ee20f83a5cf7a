"""What vLLM changes in a process that is not its own, and how the trainer gets it back."""

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
    """Undo what building the engine does: environment, thread setter, matmul precision.

    What the body adds under VLLM_* stays, for vLLM reads it later.
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
    """Give the trainer its random states back: vLLM seeds them and draws from them."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def name_run() -> str:
    """Name vLLM's shared memory: two runs on one machine must not meet in it. A collective."""
    name = [os.urandom(8).hex()]
    dist.broadcast_object_list(name, src=0)
    return name[0]


def unlink_shared_memory(run_name: str, first_rank: int, tp_size: int) -> None:
    """Free the names of the memory that the replica's ranks share on a CPU; their mappings stay.

    vLLM never does, and a killed run would leave it behind.
    """
    ranks = "-".join(str(first_rank + i) for i in range(tp_size))
    for file in Path("/dev/shm").glob(f"{run_name}-*"):
        if f"[{ranks}]" in file.name:
            file.unlink(missing_ok=True)

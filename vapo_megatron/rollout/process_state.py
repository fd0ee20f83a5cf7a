"""What vLLM changes in a process that is not its own, and how the trainer gets it back."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch


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

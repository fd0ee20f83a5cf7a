"""Fixtures shared by all rooms."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from tests.workers import WorkerPool


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same random state, on one thread."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def workers():
    """Real gloo processes: workers.run(world_size, function, *args)."""
    pool = WorkerPool()
    yield pool
    pool.close()

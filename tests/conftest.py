"""Fixtures shared by all rooms."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from tests.launched import Launched
from tests.workers import WorkerPool, prepare


def pytest_collection_finish(session):
    """Import in the background what the chosen tests' worker processes need."""
    option = session.config.option
    asked = {name for item in session.items for name in item.fixturenames}
    with_vllm = asked & {"vllm_workers", "launch"}
    modules = ["vapo_megatron.trainer"] if with_vllm or "workers" in asked else []
    modules += ["vapo_megatron.rollout.engine"] if with_vllm else []
    prepare([] if option.collectonly else modules, each_by_itself=option.markexpr == "slow")


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same random state, on one thread."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


def _pool():
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def workers():
    """Real gloo processes: workers.run(world_size, function, *args)."""
    yield from _pool()


@pytest.fixture(scope="module")
def vllm_workers():
    """The same for functions that use vLLM, which keeps its groups when it has failed to start."""
    yield from _pool()


@pytest.fixture(scope="session")
def launch():
    """launch(function, *args, world_size=N) -> Launched: a command's processes, vLLM in them."""
    return Launched

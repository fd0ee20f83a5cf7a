"""The processes of distributed tests: what they do shows a hang, whatever the machine's speed."""

import time

import pytest
import torch.distributed as dist

from tests import workers as module


def wait_for_another():
    if dist.get_rank() == 0:
        time.sleep(600)
    dist.barrier()


def compute(seconds):
    """Take so much CPU time."""
    while time.process_time() < seconds:
        pass
    return "done"


def process_time():
    return time.process_time()


@pytest.fixture
def pool():
    pool = module.WorkerPool()
    yield pool
    pool.close()


def test_ranks_that_do_nothing_hang(pool, monkeypatch):
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.5)
    with pytest.raises(AssertionError, match="ranks did nothing for 0.5 s"):
        pool.run(2, wait_for_another)


def test_ranks_that_compute_do_not(pool, monkeypatch):
    (begun,) = pool.run(1, process_time)
    monkeypatch.setattr(module, "IDLE_SECONDS", 1.0)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.1)
    assert pool.run(1, compute, begun + 1.5) == ["done"]


def test_ranks_that_compute_without_end_are_stopped(pool):
    with pytest.raises(AssertionError, match="ranks did not answer within 1 s of CPU time each"):
        pool.run(1, compute, 1e6, timeout_seconds=1)

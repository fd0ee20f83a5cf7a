"""The processes of distributed tests: what they do shows a hang, whatever the machine's speed."""

import gc
import time
from pathlib import Path

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


def leave_groups(count):
    """As models and an inference engine do: the groups are in a cycle, and the engine freezes."""
    holder = [dist.new_group() for _ in range(count)]
    holder.append(holder)
    gc.freeze()


def waking_threads():
    """Return how many threads of this process wake for gloo: one a device."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    assert "pt_gloo_runloop" in names
    return names.count("gloo_tcp_loop")


def test_all_groups_of_a_process_share_a_device(pool):
    pool.run(2, leave_groups, 3)
    assert pool.run(2, waking_threads) == [1, 1]

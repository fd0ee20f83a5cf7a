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


def leave_a_group():
    """As a model and an inference engine do: the group is in a cycle, and the engine freezes."""
    holder = [dist.new_group()]
    holder.append(holder)
    gc.freeze()


def group_threads():
    """Threads of groups, the task's own one among them: gloo wakes each 100 times a second."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name == "gloo_tcp_loop" for name in names)


def test_a_process_keeps_no_group_of_an_earlier_task(pool):
    before = pool.run(2, group_threads)
    assert before[0] > 0
    for _ in range(3):
        pool.run(2, leave_a_group)
    assert pool.run(2, group_threads) == before

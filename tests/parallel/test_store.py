"""Ranks rendezvous in a store that earlier attempts have used: real stores, a thread per rank.

Not exercised: torchrun, which leaves such a store to the processes that it restarts;
tests/e2e/test_faults.py has it.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from vapo_megatron.parallel import store


def meet(shared, world_size):
    """The part that each rank has agreed on."""
    with ThreadPoolExecutor(world_size) as threads:
        ranks = range(world_size)
        return list(threads.map(lambda r: store.unused_part(shared, r, world_size, 20), ranks))


def read(parts, value):
    """Write through the first part, read through all."""
    parts[0].set("x", value)
    return [part.get("x").decode() for part in parts]


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_attempt_has_a_part_of_its_own(world_size):
    shared = dist.HashStore()
    first, second = meet(shared, world_size), meet(shared, world_size)
    assert read(first, "old") == ["old"] * world_size
    assert not any(part.check(["x"]) for part in second), "an earlier attempt's value is not read"
    assert read(second, "new") == ["new"] * world_size


def test_what_an_attempt_that_never_met_has_left_misleads_nobody():
    shared = dist.HashStore()
    for rank in (1, 2):
        shared.set(f"nonce/{rank}", "gone")
        shared.set(f"offer/{rank}", "stale gone")
        shared.set(f"taken/{rank}", "stale")
    assert read(meet(shared, 3), "whole") == ["whole"] * 3


def test_who_comes_alone_is_told():
    shared = dist.HashStore()
    shared.set("offer/1", "stale gone")
    with pytest.raises(TimeoutError, match="3 processes did not meet in 0.2 s"):
        store.unused_part(shared, 1, 3, 0.2)


def test_the_first_value_is_everyones(monkeypatch):
    parts = meet(dist.HashStore(), 3)
    answers = []
    for part, value in zip(parts, ("2024-02-29", "2024-03-01", "2024-02-29"), strict=True):
        monkeypatch.setattr(store, "own_connection", lambda part=part: part)
        answers.append(store.agree("date", value))
    assert answers == ["2024-02-29"] * 3 and store.agree("other", "x") == "x"


def exchange(sizes):
    """What the first rank receives from all, twice; what it does when one sends nothing."""
    rank, box, stop = dist.get_rank(), store.Mailbox(), threading.Event()
    found = []
    for name in ("a", "b"):
        box.send(name, (rank, name, b"x" * sizes[rank]))
        if rank == 0:
            found.append([[*who, len(data)] for *who, data in box.receive(name, stop)])
    if rank == 0:
        box.send("c", 0)
        threading.Timer(0.1, stop.set).start()
        found.append(box.receive("c", stop))
    return found


def test_a_mailbox_brings_what_all_have_sent_however_large(workers):
    first, second = workers.run(2, exchange, [10, 5 << 20])
    assert first == [*([[0, n, 10], [1, n, 5 << 20]] for n in "ab"), None] and second == []

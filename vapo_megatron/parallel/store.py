"""The store through which processes rendezvous and exchange short messages.

Before `join`: processes with torchrun's environment. After: all of them use the same part of the
store, which nobody had written to.
"""

from __future__ import annotations

import datetime
import os
import time

import torch.distributed as dist

_current: dist.Store | None = None


def join(timeout_seconds: float) -> tuple[dist.Store, int, int]:
    """Meet all processes that torchrun started; return (store, rank, number of processes)."""
    global _current
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    _current = unused_part(store, rank, world_size, timeout_seconds)
    return _current, rank, world_size


def own_connection() -> dist.Store:
    """Return the joined store over another connection: a connection serves one thread at a time."""
    assert _current is not None, "store.join has not been called"
    return _current.clone()  # type: ignore[attr-defined]


def unused_part(
    store: dist.Store, rank: int, world_size: int, timeout_seconds: float
) -> dist.Store:
    """Agree on a part of the store that nobody has written to. Collective over all ranks.

    With static rendezvous (torchrun's default), processes restarted after a failure
    (--max-restarts) find the store as the failed ones left it, and would connect to those. So each
    rank writes a nonce and accepts only an offer that repeats it, which a stale one does not.

    Raises:
        TimeoutError: not all ranks joined.
    """
    nonce, others = os.urandom(8).hex(), range(1, world_size)

    def offered() -> str | None:
        """Rank 0: offer its nonce, as the part's name, to each other rank until all accept it."""
        if world_size > 1:
            nonces = store.multi_get([f"nonce/{r}" for r in others])
            offers = [f"{nonce} {other.decode()}" for other in nonces]
            store.multi_set([f"offer/{r}" for r in others], offers)  # type: ignore[attr-defined]
        taken = [store.compare_set(f"taken/{r}", "", "nothing").decode() for r in others]
        return nonce if all(one == nonce for one in taken) else None

    def accepted() -> str | None:
        """Other ranks: accept an offer made to this rank's nonce."""
        offer, repeated = store.get(f"offer/{rank}").decode().split()
        if repeated != nonce:
            return None
        store.set(f"taken/{rank}", offer)
        return offer

    store.set(f"nonce/{rank}", nonce)
    deadline = time.monotonic() + timeout_seconds
    while (name := offered() if rank == 0 else accepted()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{world_size} processes did not meet in {timeout_seconds:g} s")
        time.sleep(0.05)
    return dist.PrefixStore(name, store)

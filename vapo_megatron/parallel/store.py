"""The store through which processes rendezvous and exchange short messages.

Before `join`: processes with torchrun's environment. After: all of them share a fresh prefix of the
store.
"""

from __future__ import annotations

import datetime
import os
import pickle
import threading
import time
from typing import Any

import torch.distributed as dist

_current: dist.Store | None = None
_PIECE_BYTES = 1 << 20
"""A server refuses larger messages than 8 MiB."""


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


def agree(name: str, value: str) -> str:
    """Return the value that the first process to ask has; own_connection's store keeps it."""
    return own_connection().compare_set(f"agreed/{name}", "", value).decode()


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


class Mailbox:
    """Passes objects from a thread of every rank to one of rank 0, beside the collectives."""

    def __init__(self) -> None:
        """Connect to the store of torch.distributed's world; one thread may use it."""
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]

    def send(self, name: str, value: Any) -> None:
        """Send this rank's value; `name` is new on all ranks."""
        data, name = pickle.dumps(value), f"mailbox/{name}/{dist.get_rank()}"
        pieces = [data[i : i + _PIECE_BYTES] for i in range(0, len(data), _PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{name}/{number}", piece)
        self._store.set(name, str(len(pieces)))

    def receive(self, name: str, stop: threading.Event) -> list[Any] | None:
        """Wait for every rank's value; None: `stop` was set before all had been sent."""
        values = []
        for rank in range(dist.get_world_size()):
            key = f"mailbox/{name}/{rank}"
            while not self._store.check([key]):
                if stop.wait(0.02):
                    return None
            keys = [f"{key}/{number}" for number in range(int(self._store.get(key)))]
            values.append(pickle.loads(b"".join(map(self._store.get, keys))))
            for used in (*keys, key):
                self._store.delete_key(used)
        return values

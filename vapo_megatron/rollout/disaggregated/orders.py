"""What trainers ask of rollout workers: short messages through the store, in one order for all.

The main trainer numbers its orders, and every rollout worker handles all of them in that sequence.
Most are followed by collectives of the joint group, so all processes issue the same collectives in
the same order and cannot deadlock. Rollout workers report progress under separate keys, which the
main trainer polls.
"""

from __future__ import annotations

import json
import time
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from vapo_megatron.parallel.worlds import Worlds

Kind = Literal["start", "publish", "want", "take", "evaluate", "save", "dump", "end"]
POLL_SECONDS = 0.005


class Order(NamedTuple):
    """One message."""

    number: int
    kind: Kind
    fields: dict[str, Any]
    """JSON values."""


class Orders:
    """One process's end; a thread's own connection to the store."""

    def __init__(self, store: dist.Store, worlds: Worlds) -> None:
        """Nothing has been ordered yet."""
        self._store, self._worlds = store, worlds
        self._number = 0
        """Of the next order to give or to receive."""
        self._head: Order | None = None

    def give(self, kind: Kind, **fields: Any) -> int:
        """Order something, on every trainer; the main one sends it. Returns its number."""
        if self._worlds.rank == 0:
            self._store.set(f"order/{self._number}", json.dumps([kind, fields]))
        self._number += 1
        return self._number - 1

    def head(self) -> Order | None:
        """Return this rollout worker's next order, which `advance` removes; None: none yet."""
        key = f"order/{self._number}"
        if self._head is None and self._store.check([key]):
            self._head = Order(self._number, *json.loads(self._store.get(key)))
        return self._head

    def wait(self) -> Order:
        """Wait for the order that is next."""
        while (order := self.head()) is None:
            time.sleep(POLL_SECONDS)
        return order

    def advance(self) -> None:
        """Go on to the next order."""
        self._head = None
        self._number += 1

    def report(self, what: str) -> None:
        """Tell the main trainer that this rollout worker has done something."""
        self._store.set(f"done/{what}/{self._worlds.rank}", "")

    def have_all(self, what: str) -> bool:
        """Whether every rollout worker has reported it."""
        return self._store.check([f"done/{what}/{rank}" for rank in self._worlds.rollout_workers])

    def cancel(self, number: int) -> None:
        """Tell the rollout workers, on the main trainer, not to finish an order."""
        if self._worlds.rank == 0:
            self._store.set(f"cancel/{number}", "")

    def is_cancelled(self, number: int) -> bool:
        """Whether the trainers have given an order up."""
        return self._store.check([f"cancel/{number}"])

"""Files and deadlines that a loop waits for, at a cost that does not grow with their number."""

from __future__ import annotations

import heapq
import itertools
import math
import selectors
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

T = TypeVar("T")


class Watch(Generic[T]):
    """Files with what is to be called for each, and things with a deadline."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._deadlines: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()

    def react(self, file: int, events: int, reaction: Callable[[int], None]) -> None:
        """Let a reaction be called with the events that have happened, in place of any before."""
        if file in self._selector.get_map():
            self._selector.modify(file, events, reaction)
        else:
            self._selector.register(file, events, reaction)

    def forget(self, *files: int) -> None:
        """Watch these no more, if they are; to be called before one is closed."""
        for file in files:
            if file in self._selector.get_map():
                self._selector.unregister(file)

    def note(self, deadline: float, what: T) -> None:
        """Let `look` end then, and `overdue` return what it is for."""
        heapq.heappush(self._deadlines, (deadline, next(self._numbers), what))

    def look(self, seconds: float) -> None:
        """Wait so long at most for an event or a deadline, and call the reactions."""
        if self._deadlines:
            seconds = min(seconds, self._deadlines[0][0] - time.monotonic())
        for key, events in self._selector.select(max(seconds, 0) if seconds < math.inf else None):
            key.data(events)

    def overdue(self) -> Iterator[tuple[float, T]]:
        """Take out each deadline that has passed."""
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, _, what = heapq.heappop(self._deadlines)
            yield deadline, what

    def close(self) -> None:
        """Give the kernel's part back."""
        self._selector.close()

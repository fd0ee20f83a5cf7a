"""Worker processes with a time limit per request; one that hangs or dies is killed and replaced.

Only an idle worker is sent a request, so the limit does not count time in a queue. Nothing here
blocks on a pipe: a worker may be stopped while it is sent something large. Workers share no pipe:
its lock would stay locked when the worker that holds it is killed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from vapo_megatron.sandbox.channel import DIED, OUT_OF_MEMORY, OVER_TIME, Reply, message
from vapo_megatron.sandbox.process import (
    MAX_FAILED_STARTS,
    HandlerRefused,
    Process,
    command,
    setup_message,
)


class _Worker(Process):
    """One process: starting, idle or busy."""

    def __init__(self, command: Sequence[str], setup: bytes) -> None:
        super().__init__(command, setup)
        self.task: int | None = None

    @property
    def idle(self) -> bool:
        return self.ready and self.task is None

    def begin(self, task: int, request: bytes, timeout_seconds: float) -> None:
        self.task = task
        self.deadline = time.monotonic() + timeout_seconds
        self.send(request)


def _kill_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # A forked child must not kill its parent's workers.
        for worker in workers:
            worker.kill()
    workers.clear()


class WorkerPool:
    """Worker processes, started on first use and replaced when they hang or die.

    Args:
        handler: "module:function"; see worker.py.
        options: the function's arguments.
        num_workers: processes.
        timeout_seconds: limit for one request, counted from when a worker receives it.
        memory_bytes: address space that a worker may take beyond what its handler took to load.
    """

    def __init__(
        self,
        handler: str,
        options: Mapping[str, Any],
        num_workers: int,
        timeout_seconds: float,
        memory_bytes: int,
    ) -> None:
        self._setup = setup_message(handler, options, timeout_seconds, memory_bytes)
        self._command = command("worker.py")
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        self._workers: list[_Worker] = []
        self.about: dict[str, Any] | None = None
        """What the handler said of itself; None: no worker has been ready yet."""
        self._failed_starts = 0
        self._lock = threading.RLock()
        self._owner = os.getpid()
        weakref.finalize(self, _kill_all, self._workers, self._owner)

    @property
    def process_ids(self) -> list[int]:
        """Ids of the running workers."""
        return [worker.process.pid for worker in self._workers]

    def start(self) -> None:
        """Start missing workers; returns immediately, while they load in the background."""
        with self._lock:
            for worker in [w for w in self._workers if w.idle and w.process.poll() is not None]:
                self._remove(worker)
            while len(self._workers) < self._num_workers:
                self._workers.append(_Worker(self._command, self._setup))

    def close(self) -> None:
        """Kill every worker; the next use starts new ones."""
        with self._lock:
            _kill_all(self._workers, self._owner)

    def describe(self) -> dict[str, Any]:
        """Return what the handler says of itself, once a worker is ready. Raises as `run` does."""
        with self._lock, self._closing_on_error():
            while self.about is None:
                self.start()
                self._wait()
            return self.about

    def run(self, requests: Sequence[Any]) -> list[Reply]:
        """Answer all requests -> replies, in order.

        A request whose worker died is retried once: the death may be unrelated to the request.

        Raises:
            HandlerRefused: the handler does not load.
            RuntimeError: the workers cannot start.
        """
        with self._lock, self._closing_on_error():
            return self._run(requests)

    @contextlib.contextmanager
    def _closing_on_error(self) -> Any:
        try:
            yield
        except BaseException:
            _kill_all(self._workers, self._owner)
            raise

    def _run(self, requests: Sequence[Any]) -> list[Reply]:
        replies: dict[int, Reply] = {}
        queue = deque(range(len(requests)))
        retried: set[int] = set()
        while len(replies) < len(requests):
            self.start()
            for worker in self._workers:
                if worker.idle and queue:
                    task = queue.popleft()
                    worker.begin(task, message(requests[task]), self._timeout_seconds)
            for worker, reply in self._wait():
                done, worker.task = worker.task, None
                if reply in (DIED, OVER_TIME, OUT_OF_MEMORY):
                    self._remove(worker)
                if done is None:
                    continue
                if reply in (DIED, OUT_OF_MEMORY) and done not in retried:
                    retried.add(done)
                    queue.appendleft(done)
                else:
                    replies[done] = reply
        return [replies[i] for i in range(len(requests))]

    def _wait(self) -> list[tuple[_Worker, Reply]]:
        """Wait for a message, a deadline or room in a pipe -> the workers that have a reply."""
        waiting = [w for w in self._workers if not w.idle]
        with selectors.DefaultSelector() as selector:
            for worker in waiting:
                selector.register(worker.incoming, selectors.EVENT_READ, worker)
                if worker.unsent:
                    selector.register(worker.outgoing, selectors.EVENT_WRITE, worker)
            limit = min(w.deadline for w in waiting) - time.monotonic()
            events = [(key.data, mask) for key, mask in selector.select(max(limit, 0.0))]
        outcomes = []
        for worker, mask in events:
            if mask & selectors.EVENT_WRITE:
                worker.write()
            elif (reply := worker.receive()) is not None:
                outcomes.append((worker, reply))
        done = [worker for worker, _ in outcomes]
        now = time.monotonic()
        outcomes += [(w, OVER_TIME) for w in waiting if w not in done and w.deadline <= now]
        for worker, reply in outcomes:
            if not worker.ready:
                self._note_start(worker, reply)
        return outcomes

    def _note_start(self, worker: _Worker, reply: Reply) -> None:
        if "ready" in reply:
            worker.ready = True
            self.about = reply["ready"]
            self._failed_starts = 0
            return
        if "refused" in reply:
            raise HandlerRefused(reply["refused"])
        worker.kill_after(reply)
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._failed_starts = 0
            raise worker.broken()

    def _remove(self, worker: _Worker) -> None:
        worker.kill()
        self._workers.remove(worker)

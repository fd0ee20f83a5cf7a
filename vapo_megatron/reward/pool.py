"""Worker processes with a time limit per task; one that hangs or dies is killed and replaced.

Only an idle worker is sent a task, so the limit does not count time in a queue. Every message is
far smaller than a pipe's buffer: writing never blocks. Workers share no pipe: its lock would stay
locked when the worker that holds it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.reward.worker import HEADER

START_LIMIT_SECONDS = 120.0
"""Longest wait for a worker's imports; a loaded machine takes many times the usual half second."""
MAX_FAILED_STARTS = 3
"""Failed starts in a row after which the environment is taken to be broken."""

OVER_TIME = "over_time"
DIED = "died"


class _Worker:
    """One process: starting, idle or busy."""

    def __init__(self, command: Sequence[str]) -> None:
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
        )
        self.ready = False
        self.task: int | None = None
        self.deadline = time.monotonic() + START_LIMIT_SECONDS
        self._received = b""

    @property
    def idle(self) -> bool:
        return self.ready and self.task is None

    def send(self, task: int, request: dict[str, Any], timeout_seconds: float) -> None:
        data = json.dumps(request).encode()
        self.task = task
        self.deadline = time.monotonic() + timeout_seconds
        try:
            os.write(self.process.stdin.fileno(), HEADER.pack(len(data)) + data)  # type: ignore[union-attr]
        except BrokenPipeError:
            pass  # It has died, which `receive` reports.

    def receive(self) -> str | None:
        """Return the status that has arrived, DIED, or None if the message is not complete yet."""
        data = os.read(self.process.stdout.fileno(), 65536)  # type: ignore[union-attr]
        if not data:
            return DIED
        self._received += data
        if len(self._received) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        status = json.loads(self._received[HEADER.size : end])["status"]
        self._received = self._received[end:]
        return status

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()  # type: ignore[union-attr]


def _kill_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # A forked child must not kill its parent's workers.
        for worker in workers:
            worker.kill()
    workers.clear()


class JudgePool:
    """Worker processes, started on first use and replaced when they hang or die."""

    def __init__(self, num_workers: int, timeout_seconds: float, memory_limit_bytes: int) -> None:
        script = Path(__file__).with_name("worker.py")
        limits = [str(timeout_seconds), str(memory_limit_bytes)]
        # -P: a file in the script's or the current directory must not shadow a library.
        self._command = [sys.executable, "-P", str(script), *limits]
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        self._workers: list[_Worker] = []
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
                self._workers.append(_Worker(self._command))

    def close(self) -> None:
        """Kill every worker; the next use starts new ones."""
        with self._lock:
            _kill_all(self._workers, self._owner)

    def run(self, requests: Sequence[dict[str, Any]]) -> list[str]:
        """Judge all requests -> their statuses, in order: the worker's, OVER_TIME or DIED.

        A task whose worker died is retried once: the death may be unrelated to the task.

        Raises:
            RuntimeError: the workers cannot start.
        """
        with self._lock:
            try:
                return self._run(requests)
            except BaseException:
                _kill_all(self._workers, self._owner)
                raise

    def _run(self, requests: Sequence[dict[str, Any]]) -> list[str]:
        statuses: dict[int, str] = {}
        queue = deque(range(len(requests)))
        retried: set[int] = set()
        while len(statuses) < len(requests):
            self.start()
            for worker in self._workers:
                if worker.idle and queue:
                    task = queue.popleft()
                    worker.send(task, requests[task], self._timeout_seconds)
            for worker, status in self._wait():
                done, worker.task = worker.task, None
                if status in (DIED, OVER_TIME, "out_of_memory"):
                    self._remove(worker)
                if done is None:
                    continue
                if status in (DIED, "out_of_memory") and done not in retried:
                    retried.add(done)
                    queue.appendleft(done)
                else:
                    statuses[done] = status
        return [statuses[i] for i in range(len(requests))]

    def _wait(self) -> list[tuple[_Worker, str]]:
        """Wait for a message or a deadline -> the workers concerned, each with its status."""
        waiting = [w for w in self._workers if not w.idle]
        with selectors.DefaultSelector() as selector:
            for worker in waiting:
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
            limit = min(w.deadline for w in waiting) - time.monotonic()
            arrived = [key.data for key, _ in selector.select(max(limit, 0.0))]
        outcomes = []
        for worker in arrived:
            status = worker.receive()
            if status is not None:
                outcomes.append((worker, status))
        done = [worker for worker, _ in outcomes]
        now = time.monotonic()
        outcomes += [(w, OVER_TIME) for w in waiting if w not in done and w.deadline <= now]
        for worker, status in outcomes:
            if not worker.ready:
                self._note_start(worker, status)
        return outcomes

    def _note_start(self, worker: _Worker, status: str) -> None:
        if status == "ready":
            worker.ready = True
            self._failed_starts = 0
            return
        if status == DIED:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(5)  # Its pipe closes before it has printed its error.
        worker.kill()
        self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            self._failed_starts = 0
            raise RuntimeError(
                f"the verifier's worker {' '.join(self._command)} did not start: "
                f"exit code {worker.process.returncode}, its error is above; is math-verify "
                f"installed for {sys.executable}?"
            )

    def _remove(self, worker: _Worker) -> None:
        worker.kill()
        self._workers.remove(worker)

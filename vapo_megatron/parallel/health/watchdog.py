"""Ends the whole run when one of its processes dies, fails or hangs. Every rank has a watchdog.

It runs two threads beside training. The heartbeat thread publishes this rank's heartbeat in the
store through which the ranks met, and reads the others': rank 0 reads all, the others only rank 0
(heartbeat.py has the rules). The first rank to find a problem publishes a verdict for all. The
second thread works without its peers: it ends this process when there is a verdict, when the store
or torchrun is gone, and, through faulthandler's timer, when no Python thread can run any more.

Before exiting, each process writes its threads' stacks to RUN_DIR/stacks/rank_*.txt and its latest
collectives, from torch's flight recorder, to RUN_DIR/stacks/collectives/rank_*. It then kills its
descendants.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from torch._C import _distributed_c10d as _c10d

from vapo_megatron.config import TimeoutsConfig
from vapo_megatron.config.phases import BETWEEN, PHASES, START
from vapo_megatron.errors import UserError, report
from vapo_megatron.parallel import backend, store
from vapo_megatron.parallel.health.heartbeat import Heartbeat, Monitor, describe
from vapo_megatron.parallel.health.processes import end_now

# A live rank's heartbeat changes within this many beats.
ALIVE_BEATS = 5
# torchrun sends SIGTERM when a rank has died, and SIGKILL 30 s later: diagnose it before that.
SIGNALLED_SILENCE_SECONDS = 20.0
# Time for ranks that hit the same error, or its consequences, to exit by themselves.
PATIENCE_SECONDS = 5.0
TEARDOWN_SECONDS = 30.0

PACKAGE = f"{Path(__file__).resolve().parents[2]}/"


class Frame(NamedTuple):
    """Where a thread is, or has called from."""

    file: str
    line: int
    function: str


class Watchdog:
    """One rank's watchdog, active from construction to `close`."""

    def __init__(
        self,
        timeouts: TimeoutsConfig,
        run_dir: Path,
        rank: int,
        world_size: int,
        on_beat: Callable[[], bool],
        world: str = "",
    ) -> None:
        """Start in the phase "start"; collective, after parallel.store.join.

        Args:
            timeouts: time limits of the phases.
            run_dir: stacks are written here.
            rank: of this process.
            world_size: number of processes, of both worlds.
            on_beat: called about once a second by a thread; returns whether a stop signal is here.
            world: see Heartbeat.
        """
        self.step = 0
        """The current step, for messages."""
        self._progress: Callable[[], int] = lambda: 0
        self._timeouts, self._rank, self._world_size = timeouts, rank, world_size
        self._on_beat, self._world, self._waits = on_beat, world, 0
        self._interval = min(1.0, *(limit / 8 for limit in dict(timeouts).values()))
        self._stacks_path = Path(run_dir, "stacks", f"rank_{rank:04d}.txt")
        # A copy: the progress display may redirect standard error to a file.
        self._stderr = os.fdopen(os.dup(2), "w", errors="backslashreplace")
        self._stacks: TextIO | None = None
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        # A connection serves one thread at a time, and a read may block.
        self._store, self._publisher = store.own_connection(), store.own_connection()
        self._send_lock, self._beat = threading.Lock(), 0
        self._phase, self._count = START, 0
        # NCCL calls return before they are done; gloo's do not.
        self._runs_ahead = backend.distributed_backend() == "nccl"
        trace = "_dump_nccl_trace" if self._runs_ahead else "_dump_fr_trace"
        self._flight_recorder: Callable[..., bytes] = getattr(_c10d, trace)
        self._place = f"{socket.gethostname()}, process {os.getpid()}"
        self._main = threading.main_thread().ident
        self._failure: BaseException | None = None
        self._is_signalled = False
        self._verdict: dict[str, Any] | None = None
        # Deadline for hearing from rank 0, which may itself take start_seconds to start.
        self._answer_due = time.monotonic() + timeouts.start_seconds
        self._is_lost = False
        self._closed, self._reported, self._wake = (threading.Event() for _ in range(3))
        self._threads = [
            threading.Thread(target=work, name=f"watchdog: {work.__name__}", daemon=True)
            for work in (self._heartbeat_loop, self._watch_loop)
        ]
        for thread in self._threads:
            thread.start()

    def report_progress(self, counter: Callable[[], int]) -> None:
        """Send what counter returns with every heartbeat; the sequence is the same on all ranks."""
        self._progress = counter

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run the body as a phase."""
        outer = self._phase
        self._enter(name)
        yield
        self._enter(BETWEEN if outer == START else outer)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure the other world instead of this rank while the body waits for it."""
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error in the body to the other ranks, then close."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            self.close()
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one fails; returns once they know.

        Does not return if the error is a consequence of another rank's: this process then ends.
        """
        self._failure = error
        self._wake.set()
        self._reported.wait(2 * ALIVE_BEATS * self._interval + PATIENCE_SECONDS)
        if self._verdict is not None and not self._is_own(self._verdict):
            self._closed.wait(TEARDOWN_SECONDS)

    def close(self) -> None:
        """Stop both threads; may be called twice."""
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        self._close_stacks()
        self._stderr.close()

    def _enter(self, phase: str) -> None:
        """Send a heartbeat at once: a process that dies in the phase cannot send it later."""
        self._phase, self._count = phase, self._count + 1
        with contextlib.suppress(RuntimeError):
            self._send()

    def _send(self) -> None:
        # Threads may share this connection, because `set` waits for no answer.
        with self._send_lock:
            self._beat += 1
            heartbeat = json.dumps(dataclasses.asdict(self._heartbeat()))
            self._publisher.set(f"heartbeat/{self._rank}", heartbeat)

    def _heartbeat(self) -> Heartbeat:
        error, stack = self._failure, _stack(self._main)
        return Heartbeat(
            place=self._place,
            beat=self._beat,
            position=(self._count, self._progress()),
            phase=self._phase,
            step=self.step,
            limit_seconds=getattr(self._timeouts, PHASES[self._phase].limit),
            in_collective=any("/torch/distributed/" in frame.file for frame in stack),
            runs_ahead=self._runs_ahead,
            where=_where(stack),
            failure="" if error is None else _one_line(error),
            is_over=self._closed.is_set(),
            world=self._world,
            waits=self._waits > 0,
        )

    def _heartbeat_loop(self) -> None:
        """Publish this rank's heartbeat and check the others', until closed."""
        monitor, failed_beats = Monitor(self._timeouts.silence_seconds), 0
        try:
            while True:
                is_last = self._closed.is_set()
                self._send()
                if is_last:
                    return
                # Once: the main thread may set it while the heartbeats are read.
                error = self._failure
                failed_beats += error is not None
                reads_all = self._rank == 0 or error is not None
                heartbeats = self._receive(range(self._world_size if reads_all else 1))
                problem = self._problem(heartbeats, monitor, error, failed_beats)
                if problem is not None:
                    problem["rank"] = self._rank
                    self._store.compare_set("verdict", "", json.dumps(problem))
                if self._store.check(["verdict"]):
                    self._verdict = json.loads(self._store.get("verdict"))
                self._answer_due = time.monotonic() + self._timeouts.silence_seconds
                self._wake.wait(self._interval)
                self._wake.clear()
        except RuntimeError:
            self._is_lost = True

    def _receive(self, ranks: range) -> dict[int, Heartbeat]:
        """Read ranks' heartbeats; waits for the first of each."""
        texts = self._store.multi_get([f"heartbeat/{rank}" for rank in ranks])
        found = (json.loads(text) for text in texts)
        return {
            rank: Heartbeat(**{**fields, "position": tuple(fields["position"])})
            for rank, fields in zip(ranks, found, strict=True)
        }

    def _problem(
        self,
        heartbeats: dict[int, Heartbeat],
        monitor: Monitor,
        error: BaseException | None,
        failed_beats: int,
    ) -> dict[str, Any] | None:
        """Return a verdict, or None while nothing is known to be wrong.

        Args:
            heartbeats: of rank 0; of all ranks on rank 0 and with an error.
            monitor: of their silence.
            error: this rank's.
            failed_beats: of this rank since then, this one included.
        """
        now = time.monotonic()
        if isinstance(error, UserError):
            return {"text": f"error: {error}", "code": 2}
        if error is not None:
            # The error may be the consequence of another rank's death.
            silent = monitor.silent(heartbeats, now, (ALIVE_BEATS - 1) * self._interval)
            problem = f"{describe(self._rank, heartbeats[self._rank])}: {_one_line(error)}"
            if silent:
                problem = f"{silent}. Then {problem}"
            elif failed_beats <= ALIVE_BEATS + 1:
                return None
        else:
            quick = SIGNALLED_SILENCE_SECONDS if self._is_signalled else None
            problem = monitor.silent(heartbeats, now, quick)
            if not problem and self._rank == 0:
                problem = monitor.overdue(heartbeats, now)
        return {"text": f"error: {problem}", "code": 1} if problem else None

    def _watch_loop(self) -> None:
        """End this process when needed; this thread never blocks on another rank."""
        silence, lost_since = self._timeouts.silence_seconds, None
        is_over = False
        while not is_over:
            file: TextIO = self._stderr
            # Before its first phase a run must not write to its directory.
            if self._count and self._stacks_path.parents[1].is_dir():
                with contextlib.suppress(OSError):
                    file = self._open_stacks()
            # Dumps the stacks and exits unless re-armed by this thread. It waits until the others
            # have reported the silence: earlier, they would only see lost connections.
            faulthandler.dump_traceback_later(silence + PATIENCE_SECONDS, exit=True, file=file)
            self._is_signalled = self._on_beat()
            now = time.monotonic()
            if self._is_lost and lost_since is None:
                lost_since = now
            if self._verdict is not None:
                self._end(self._verdict)
            elif self._launcher not in (None, os.getppid()):
                self._end_for("torchrun, which started this process, is gone")
            elif now > self._answer_due or now - (lost_since or now) > PATIENCE_SECONDS:
                self._end_for("rank 0, or torchrun on the first node, does not answer any more")
            is_over = self._closed.wait(self._interval)

    def _end_for(self, reason: str) -> None:
        own = describe(self._rank, self._heartbeat())
        self._end({"text": f"error: {reason}; this is {own}", "code": 1, "rank": self._rank})

    def _is_own(self, verdict: dict[str, Any]) -> bool:
        """Is the verdict about this rank's error, or has this rank hit the same user error?"""
        error = self._failure
        return error is not None and (verdict["rank"] == self._rank or isinstance(error, UserError))

    def _end(self, verdict: dict[str, Any]) -> None:
        """Write stacks, report why, give the main thread time to exit by itself, then exit."""
        text, is_user_error, is_own = verdict["text"], verdict["code"] == 2, self._is_own(verdict)
        # The process exits even if something below fails or hangs.
        faulthandler.dump_traceback_later(2 * TEARDOWN_SECONDS, exit=True, file=self._stderr)
        if not is_user_error:
            with contextlib.suppress(OSError):
                self._write_stacks(text)
            text += f"; stacks: {self._stacks_path.parent}"
            text += f"; collectives: torchfrtrace {self._stacks_path.parent / 'collectives'}"
        if not (is_user_error and is_own):  # Then the command prints it.
            own = self._failure if verdict["rank"] == self._rank else None
            trace = "" if own is None else "".join(traceback.format_exception(own))
            with contextlib.suppress(OSError):
                report(text, verdict["code"], trace, self._stderr)
        if not is_user_error:
            with contextlib.suppress(OSError):
                self._write_collectives()
        self._reported.set()
        # Healthy ranks stay, too, until the others have read the verdict.
        if not self._closed.wait(TEARDOWN_SECONDS if is_own else PATIENCE_SECONDS):
            self._close_stacks()
            end_now(verdict["code"])

    def _open_stacks(self) -> TextIO:
        if self._stacks is None:
            self._stacks_path.parent.mkdir(parents=True, exist_ok=True)
            self._stacks = self._stacks_path.open("a", errors="backslashreplace")
            faulthandler.enable(self._stacks)
        return self._stacks

    def _close_stacks(self) -> None:
        """Close the file, and remove it if it is empty."""
        if self._stacks is None or self._stacks.closed:
            return
        faulthandler.disable()
        with contextlib.suppress(OSError):  # A full disk must not hide other ranks' reports.
            self._stacks.close()
            if not self._stacks_path.stat().st_size:
                self._stacks_path.unlink()
                self._stacks_path.parent.rmdir()

    def _write_stacks(self, why: str) -> None:
        file = self._open_stacks()
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {why}", file=file)
        if self._failure is not None:
            print("".join(traceback.format_exception(self._failure)), file=file)
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)

    def _write_collectives(self) -> None:
        """Write the flight recorder's buffer, which torchfrtrace compares across ranks."""
        path = self._stacks_path.parent / "collectives" / f"rank_{self._rank}"
        path.parent.mkdir(parents=True, exist_ok=True)
        # All collectives, with their stacks, not only those that are under way.
        path.write_bytes(self._flight_recorder(True, True, False))


def _stack(thread: int | None) -> list[Frame]:
    """Return a thread's frames, the innermost first."""
    frame = sys._current_frames().get(thread or 0)
    frames = traceback.walk_stack(frame) if frame else ()
    return [Frame(f.f_code.co_filename, line, f.f_code.co_name) for f, line in frames]


def _where(stack: list[Frame]) -> str:
    """Return, for example, "roles/trained.py:90 (update), in megatron/core/utils.py:9 (f)"."""
    own = [frame for frame in stack if frame.file.startswith(PACKAGE)]
    places = []
    for frame in dict.fromkeys([*own[:1], *stack[:1]]):
        file = frame.file.removeprefix(PACKAGE).rpartition("/site-packages/")[2]
        places.append(f"{file}:{frame.line} ({frame.function})")
    return ", in ".join(places)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]

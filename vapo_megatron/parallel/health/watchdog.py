"""Ends the whole run when one process of it dies, fails or hangs: every rank has a watchdog.

Two threads beside the training. One tells the others, through the store in which the ranks met, how
far this rank is, and hears how they are; rank 0 hears of all, the others of rank 0 (heartbeat.py
has the rules). Whoever sees something wrong writes a verdict, which all ranks read. The other
thread needs nobody: it ends this process when a verdict has come, when the store or torchrun is
gone, and, by a timer of the interpreter's own, when no Python thread can run any more.

Before the end each process writes the stacks of its Python threads to RUN_DIR/stacks/rank_*.txt;
with it end all that it started.
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
from typing import Any, TextIO

from vapo_megatron.config import TimeoutsConfig
from vapo_megatron.config.phases import BETWEEN, PHASES, START
from vapo_megatron.errors import UserError, tell
from vapo_megatron.parallel import store
from vapo_megatron.parallel.health.heartbeat import Observer, Standing, where
from vapo_megatron.parallel.health.processes import end_now

# Beats in which a rank that lives is heard of, for sure.
ALIVE_BEATS = 5
# What looks like an early signal may be torchrun ending all because a rank has died; it kills the
# others, and with them what they could say, 30 s later.
SIGNALLED_SILENCE_SECONDS = 20.0
# For ranks that meet the same error, or another one's consequence, to end by themselves.
PATIENCE_SECONDS = 5.0
TEARDOWN_SECONDS = 30.0


class Watchdog:
    """This rank's; it works from its construction to `close`."""

    def __init__(
        self,
        timeouts: TimeoutsConfig,
        run_dir: Path,
        rank: int,
        world_size: int,
        on_beat: Callable[[], bool],
    ) -> None:
        """Begin to watch, in the phase "start"; collective, after parallel.store.join.

        Args:
            timeouts: each phase's limit.
            run_dir: where the stacks are written.
            rank: of this process.
            world_size: number of processes.
            on_beat: called about every second by another thread; has an early signal come?
        """
        self.step = 0
        """For messages: the step that is being made."""
        self._progress: Callable[[], int] = lambda: 0
        self._timeouts, self._rank, self._world_size = timeouts, rank, world_size
        self._on_beat = on_beat
        self._interval = min(1.0, *(limit / 8 for limit in dict(timeouts).values()))
        self._stacks_path = Path(run_dir, "stacks", f"rank_{rank:04d}.txt")
        # The display may send standard error to a file later.
        self._stderr = os.fdopen(os.dup(2), "w", errors="backslashreplace")
        self._stacks: TextIO | None = None
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._store, self._mouth = store.own_connection(), store.own_connection()
        self._speaks, self._beat = threading.Lock(), 0
        self._phase, self._count = START, 0
        self._place = f"{socket.gethostname()}, process {os.getpid()}"
        self._main = threading.main_thread().ident
        self._failure: BaseException | None = None
        self._is_signalled = False
        self._verdict: dict[str, Any] | None = None
        # When rank 0 has to have answered; how late it may begin is a matter of its start.
        self._answer_due = time.monotonic() + timeouts.start_seconds
        self._is_lost = False
        self._closed, self._told, self._wake = (threading.Event() for _ in range(3))
        self._threads = [
            threading.Thread(target=work, name=f"watchdog: {work.__name__}", daemon=True)
            for work in (self._converse, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def report_progress(self, counter: Callable[[], int]) -> None:
        """Send with every heartbeat what counter returns: a sequence that is alike on all ranks."""
        self._progress = counter

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Be in a phase in the body."""
        outer = self._phase
        self._enter(name)
        yield
        self._enter(BETWEEN if outer == START else outer)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Let the other ranks know of an error in the body, and work no longer after it."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            self.close()
            raise

    def fail(self, error: BaseException) -> None:
        """Let the other ranks know that this one ends with an error; returns when they do.

        Where it is what came of another rank's error it does not return: this process ends.
        """
        self._failure = error
        self._wake.set()
        self._told.wait(2 * ALIVE_BEATS * self._interval + PATIENCE_SECONDS)
        if self._verdict is not None and not self._is_own(self._verdict):
            self._closed.wait(TEARDOWN_SECONDS)

    def close(self) -> None:
        """Work no longer; may be called twice."""
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
        faulthandler.cancel_dump_traceback_later()
        self._close_stacks()
        self._stderr.close()

    def _enter(self, phase: str) -> None:
        """Say so at once: a process that dies in a phase cannot say it later."""
        self._phase, self._count = phase, self._count + 1
        with contextlib.suppress(RuntimeError):
            self._say()

    def _say(self) -> None:
        # This connection serves several threads, for it waits for no answer.
        with self._speaks:
            self._beat += 1
            standing = json.dumps(dataclasses.asdict(self._standing()))
            self._mouth.set(f"standing/{self._rank}", standing)

    def _standing(self) -> Standing:
        error = self._failure
        return Standing(
            place=self._place,
            beat=self._beat,
            position=(self._count, self._progress()),
            phase=self._phase,
            step=self.step,
            limit_seconds=getattr(self._timeouts, PHASES[self._phase].limit),
            waits=_is_in_collective(self._main),
            failure="" if error is None else _words(error),
            is_over=self._closed.is_set(),
        )

    def _converse(self) -> None:
        """Say how this rank is and hear how others are, until the end."""
        observer, failed_beats = Observer(self._timeouts.silence_seconds), 0
        try:
            while True:
                is_last = self._closed.is_set()
                self._say()
                if is_last:
                    return
                failed_beats += self._failure is not None
                hears_all = self._rank == 0 or failed_beats > 0
                standings = self._standings(range(self._world_size if hears_all else 1))
                problem = self._problem(standings, observer, failed_beats)
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

    def _standings(self, ranks: range) -> dict[int, Standing]:
        """Hear how ranks are; waits for their first word."""
        texts = self._store.multi_get([f"standing/{rank}" for rank in ranks])
        found = (json.loads(text) for text in texts)
        return {
            rank: Standing(**{**fields, "position": tuple(fields["position"])})
            for rank, fields in zip(ranks, found, strict=True)
        }

    def _problem(
        self, standings: dict[int, Standing], observer: Observer, failed_beats: int
    ) -> dict[str, Any] | None:
        """Return what is wrong, as a verdict; None: nothing, as far as can be seen yet."""
        now, error = time.monotonic(), self._failure
        if isinstance(error, UserError):
            return {"text": f"error: {error}", "code": 2}
        if error is not None:
            # Has another rank died, and this is what came of it?
            silent = observer.silent(standings, now, (ALIVE_BEATS - 1) * self._interval)
            problem = f"{where(self._rank, standings[self._rank])}: {_words(error)}"
            if silent:
                problem = f"{silent}. Then {problem}"
            elif failed_beats <= ALIVE_BEATS + 1:
                return None
        else:
            quick = SIGNALLED_SILENCE_SECONDS if self._is_signalled else None
            problem = observer.silent(standings, now, quick)
            if not problem and self._rank == 0:
                problem = observer.overdue(standings, now)
        return {"text": f"error: {problem}", "code": 1} if problem else None

    def _watch(self) -> None:
        """End this process when it has to; this thread waits for nobody."""
        silence, lost_since = self._timeouts.silence_seconds, None
        is_over = False
        while not is_over:
            # Writes the stacks and ends the process, unless this thread comes by again: after the
            # others have said that it is silent, or they would see their connections close first.
            file: TextIO = self._stderr
            # Before that, nothing may be written there.
            if self._count and self._stacks_path.parents[1].is_dir():
                with contextlib.suppress(OSError):
                    file = self._open_stacks()
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
        own = where(self._rank, self._standing())
        self._end({"text": f"error: {reason}; this is {own}", "code": 1, "rank": self._rank})

    def _is_own(self, verdict: dict[str, Any]) -> bool:
        """Did this rank say it because of an error of its own, or has it the same one?"""
        error = self._failure
        return error is not None and (verdict["rank"] == self._rank or isinstance(error, UserError))

    def _end(self, verdict: dict[str, Any]) -> None:
        """Write stacks, say why, let the main thread end by itself for a while, then end."""
        text, is_mistake, is_own = verdict["text"], verdict["code"] == 2, self._is_own(verdict)
        # Whatever fails or hangs below, the process ends.
        faulthandler.dump_traceback_later(2 * TEARDOWN_SECONDS, exit=True, file=self._stderr)
        if not is_mistake:
            with contextlib.suppress(OSError):
                self._write_stacks(text)
            text = f"{text}; stacks: {self._stacks_path.parent}"
        if not (is_mistake and is_own):  # Then the command tells it.
            with contextlib.suppress(OSError):
                tell(text, self._stderr)
        self._told.set()
        # Also those that are well stay so long that the others can read the verdict.
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
        """Leave no file in which nothing stands."""
        if self._stacks is None or self._stacks.closed:
            return
        faulthandler.disable()
        with contextlib.suppress(OSError):  # A full disk; other ranks may have something to say.
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


def _is_in_collective(thread: int | None) -> bool:
    """Does the thread stand in a function of torch.distributed, waiting for other ranks?"""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        if "/torch/distributed/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]

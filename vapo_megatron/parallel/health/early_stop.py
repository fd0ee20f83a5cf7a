"""Preemption: on SIGTERM, SIGUSR1 or SIGINT a run stops with a checkpoint before it is killed.

Block the signals before any thread starts; children inherit the mask. They stay pending, where the
trainer polls for them, and interrupt nothing. (A handler would not survive exec: the signal would
kill children that are other programs.) A torchrun that a recipe started blocks them too, and is
polled as well, because a scheduler may signal it alone.

SIGINT, sent by people, is handled by a dedicated thread (`interrupts_watched`): before the first
step it ends the run, later it acts like the other signals, and a second one ends the run at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NoReturn, TextIO

from vapo_megatron.errors import INTERRUPTED, report
from vapo_megatron.parallel.health.processes import end_now

SCHEDULERS = (signal.SIGUSR1, signal.SIGTERM)
SIGNALS = (*SCHEDULERS, signal.SIGINT)
POLL_SECONDS = 0.5
"""A launcher repeats SIGINT so often, for workers that it has started since."""

_interrupted, _has_started = threading.Event(), threading.Event()


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals in the body; afterwards too, unless it fails."""
    before = block_signals()
    try:
        yield
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise


def block_signals(
    signals: Sequence[signal.Signals] = SIGNALS,
) -> set[int | signal.Signals]:
    """Block the signals in this thread and what it starts; return the mask from before."""
    # Python's resource tracker, which starts with the first shared memory (vLLM's), unblocks its
    # ignored signals in the starting thread, whatever they were before. Leave ours to us: the
    # tracker process ignores them anyway.
    resource_tracker._IGNORED_SIGNALS = ()  # type: ignore[attr-defined]
    return signal.pthread_sigmask(signal.SIG_BLOCK, signals)


def end_on_interrupt(line: str) -> None:
    """Let SIGINT, where it is not blocked or ignored, end this process with a line and 130.

    Not by KeyboardInterrupt, which compiled code may turn into another exception.
    """

    def end(*_: object) -> None:
        report(line, INTERRUPTED)
        end_now(INTERRUPTED)

    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


@contextlib.contextmanager
def interrupts_watched(first: Callable[[], None], *, is_launcher: bool = False) -> Iterator[None]:
    """Take SIGINT, which must be blocked, in a thread; the second one ends the process at once.

    Args:
        first: called at the first one; a launcher's is called again and again from then on.
        is_launcher: this process starts torchrun's workers, and is none.
    """
    # torchrun repeats what it was sent, as our launcher does, and a worker cannot count that.
    repeats = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ and not is_launcher else None
    closed = threading.Event()
    # A copy: the progress display may redirect standard error to a file.
    stderr = os.fdopen(os.dup(2), "w", errors="backslashreplace")

    def watch() -> None:
        while not closed.is_set():
            found = signal.sigtimedwait([signal.SIGINT], POLL_SECONDS)
            is_again = _interrupted.is_set()
            if found is not None and is_again and found.si_pid != repeats:
                _end("ended at once by a second SIGINT, without saving", stderr)
            if found is not None:
                _interrupted.set()
            if _interrupted.is_set() and (is_launcher or not is_again):
                first()

    threading.Thread(target=watch, name="interrupts", daemon=True).start()
    try:
        yield
    finally:
        closed.set()  # The copy stays open: a second SIGINT may be under way.


def _end(what: str, stderr: TextIO | None = None, code: int = INTERRUPTED) -> NoReturn:
    """Say what became of the run and end this process with all that it has started."""
    report(f"{what}; start it again to resume from its latest checkpoint", INTERRUPTED, "", stderr)
    end_now(code)


def end_before_first_step() -> None:
    """End this process unless a step or an evaluation has begun: there is nothing to save."""
    if not _has_started.is_set():
        # With 0 under torchrun, which would start it again.
        code = 0 if "TORCHELASTIC_RUN_ID" in os.environ else INTERRUPTED
        _end("stopped by SIGINT before its first step", code=code)


def note_started() -> None:
    """Note that from now on a stop takes a checkpoint."""
    _has_started.set()


def pending_signal() -> str:
    """Name a signal pending for this process or the torchrun that started it, else "".

    Once pending it stays so.
    """
    if _interrupted.is_set():
        return signal.SIGINT.name
    pending = set(signal.sigpending())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        pending |= _pending_in(os.getppid())
    return next((number.name for number in SIGNALS if number in pending), "")


def _pending_in(process: int) -> set[int]:
    try:
        status = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return set()
    bits = int(next(line for line in status if line.startswith("ShdPnd:")).split()[1], 16)
    return {number for number in SIGNALS if bits >> (number - 1) & 1}


@dataclasses.dataclass
class EarlyStop:
    """Decides after a signal whether there is time to go on, by the times of the last step."""

    grace_seconds: float
    """Time from the signal until the run must have ended."""
    poll: Callable[[], str] = pending_signal
    clock: Callable[[], float] = time.monotonic
    save_seconds: float | None = None
    """Time until a checkpoint is on disk; None: unknown, half of the grace is reserved."""
    announce: Callable[[str], object] = str
    """Shows a line when a signal has arrived."""
    signal_name: str = ""
    """The signal that has arrived; "" for none."""
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    _deadline: float = math.inf
    _start: float = 0.0
    # Unknown, and 0, in a run's first step: nothing can be lost before it.
    _step_seconds: float = 0.0
    _update_seconds: float = 0.0
    _evaluation_seconds: float = 0.0

    def is_signalled(self) -> bool:
        """Has a signal arrived? Any thread may ask; the deadline counts from the first yes."""
        with self._lock:
            found = "" if self.signal_name else self.poll()
            if found:
                self._deadline = self.clock() + self.grace_seconds
                self.signal_name = found
                again = ", and at once after a second one" if found == "SIGINT" else ""
                self.announce(
                    f"{found}: the run stops with a checkpoint within "
                    f"checkpoint.grace_seconds={self.grace_seconds:g}{again}"
                )
        return bool(self.signal_name)

    def begin(self) -> None:
        """Note that a step or an evaluation begins."""
        note_started()
        self._start = self.clock()

    def record(self, times: Mapping[str, float]) -> None:
        """Take the `time/*_seconds` of a step's row."""
        seconds = {name: times.get(f"time/{name}_seconds", 0.0) for name in _NAMES}
        if seconds["evaluation"]:
            self._evaluation_seconds = seconds["evaluation"]
        if seconds["exchange"]:  # Row 0 is an evaluation alone.
            extra = seconds["evaluation"] + seconds["checkpoint"]
            self._step_seconds = seconds["step"] - extra
            self._update_seconds = sum(seconds[name] for name in _FROM_UPDATES_ON)

    def has_time_to_evaluate(self) -> bool:
        """Is there time to finish the current evaluation and save a checkpoint?"""
        return self._has_time(self._evaluation_seconds - self._elapsed())

    def has_time_to_finish(self) -> bool:
        """Is there time to finish the current step and save? Ask before its first update."""
        return self._has_time(max(self._step_seconds - self._elapsed(), self._update_seconds))

    def has_time_to_save(self) -> bool:
        """Is there time for more before a checkpoint is saved?"""
        return self._has_time(0.0)

    def _elapsed(self) -> float:
        return self.clock() - self._start

    def _has_time(self, seconds: float) -> bool:
        if not self.is_signalled():
            return True
        save = self.grace_seconds / 2 if self.save_seconds is None else self.save_seconds
        return self.clock() + max(seconds, 0.0) + save <= self._deadline


_FROM_UPDATES_ON = ("critic_update", "actor_update", "sync")
_NAMES = ("step", "evaluation", "checkpoint", "exchange", *_FROM_UPDATES_ON)

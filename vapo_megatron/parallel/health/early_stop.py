"""Preemption: on SIGTERM or SIGUSR1 a run stops with a checkpoint before it is killed.

Block both signals before any thread starts; children inherit the mask. They stay pending, where the
trainer polls for them, and interrupt nothing. (A handler would not survive exec: the signal would
kill children that are other programs.) A torchrun that a recipe started blocks them too, and is
polled as well, because a scheduler may signal it alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals in the body; afterwards too, unless it fails."""
    before = block_signals()
    try:
        yield
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise


def block_signals() -> set[int | signal.Signals]:
    """Block the signals in this thread and what it starts; return the mask from before."""
    # Python's resource tracker, which starts with the first shared memory (vLLM's), unblocks its
    # ignored signals in the starting thread, whatever they were before. Leave these two to us: the
    # tracker process ignores both anyway.
    resource_tracker._IGNORED_SIGNALS = (signal.SIGINT,)  # type: ignore[attr-defined]
    return signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def pending_signal() -> str:
    """Name a signal pending for this process or the torchrun that started it, else "".

    Once pending it stays so.
    """
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
    signal_name: str = ""
    """The signal that has arrived; "" for none."""
    _deadline: float = math.inf
    _begun: float = 0.0
    # Unknown, and 0, in a run's first step: nothing can be lost before it.
    _step_seconds: float = 0.0
    _update_seconds: float = 0.0
    _evaluation_seconds: float = 0.0

    def is_signalled(self) -> bool:
        """Has a signal arrived? Any thread may ask; the deadline counts from the first yes."""
        if not self.signal_name:
            found = self.poll()
            if found:
                self._deadline = self.clock() + self.grace_seconds
                self.signal_name = found
        return bool(self.signal_name)

    def begin(self) -> None:
        """Note that a step or an evaluation begins."""
        self._begun = self.clock()

    def record(self, times: Mapping[str, float]) -> None:
        """Take the `time/*_seconds` of a step's row."""
        seconds = {name: times.get(f"time/{name}_seconds", 0.0) for name in _NAMES}
        if seconds["evaluation"]:
            self._evaluation_seconds = seconds["evaluation"]
        if seconds["logprobs"]:  # Row 0 is an evaluation alone.
            apart = seconds["evaluation"] + seconds["checkpoint"]
            self._step_seconds = seconds["step"] - apart
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
        return self.clock() - self._begun

    def _has_time(self, seconds: float) -> bool:
        if not self.is_signalled():
            return True
        save = self.grace_seconds / 2 if self.save_seconds is None else self.save_seconds
        return self.clock() + max(seconds, 0.0) + save <= self._deadline


_FROM_UPDATES_ON = ("critic_update", "actor_update", "sync")
_NAMES = ("step", "evaluation", "checkpoint", "logprobs", *_FROM_UPDATES_ON)

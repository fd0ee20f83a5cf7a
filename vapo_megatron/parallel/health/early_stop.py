"""An early signal, SIGTERM or SIGUSR1: a run stops with a checkpoint before it would be killed.

Both are blocked from the start on, before there are threads, in all that is started then: nothing
dies of them, nothing is interrupted, and they stay pending where the trainer looks for them. A
handler would be lost in every child that is another program, which the signal would then end. Where
torchrun was started by a recipe it blocks them too, and is looked at as well, for a scheduler may
signal it alone.
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


def hold_back() -> None:
    """Keep the signals pending in this process and its children."""
    _block()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Keep the signals pending in the body, and after it too unless it fails."""
    before = _block()
    try:
        yield
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise


def _block() -> set[int | signal.Signals]:
    """Block them in this thread, and in those that it starts; return what it has blocked before."""
    # Python starts this helper with the first memory that processes share; vLLM's first rank does,
    # to see who is on its node. It then unblocks these two, whatever they were before, in the
    # thread that starts it and so in all that come of that one. A helper ignores both anyway.
    resource_tracker._IGNORED_SIGNALS = (signal.SIGINT,)  # type: ignore[attr-defined]
    return signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def heard() -> str:
    """Name a signal that has reached this process, or the torchrun that started it, else "".

    Since it was held back; it never goes away.
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
    """Is there time for what is ahead? Seconds of the last step stand for those of this one."""

    grace_seconds: float
    """From the signal to when the run has to be over."""
    hear: Callable[[], str] = heard
    clock: Callable[[], float] = time.monotonic
    save_seconds: float | None = None
    """Of a checkpoint, until it is on disk; None: half of the grace, for nothing is known."""
    signal_name: str = ""
    """Of the signal that has come; empty: none."""
    _deadline: float = math.inf
    _begun: float = 0.0
    # Nothing is known of a run's first step, before which there is nothing that could be lost.
    _step_seconds: float = 0.0
    _update_seconds: float = 0.0
    _evaluation_seconds: float = 0.0

    def look(self) -> bool:
        """Has a signal come? Called often enough, by any thread, the deadline is right."""
        if not self.signal_name:
            found = self.hear()
            if found:
                self._deadline = self.clock() + self.grace_seconds
                self.signal_name = found
        return bool(self.signal_name)

    def begin(self) -> None:
        """A step, or an evaluation, begins."""
        self._begun = self.clock()

    def learn(self, times: Mapping[str, float]) -> None:
        """Take a step's `time/*_seconds`, as they stand in its row."""
        seconds = {name: times.get(f"time/{name}_seconds", 0.0) for name in _NAMES}
        if seconds["evaluation"]:
            self._evaluation_seconds = seconds["evaluation"]
        if seconds["logprobs"]:  # Row 0 is an evaluation alone.
            apart = seconds["evaluation"] + seconds["checkpoint"]
            self._step_seconds = seconds["step"] - apart
            self._update_seconds = sum(seconds[name] for name in _FROM_UPDATES_ON)

    def has_time_to_evaluate(self) -> bool:
        """Can the evaluation that has begun be finished, and the step be saved?"""
        return self._has_time(self._evaluation_seconds - self._elapsed())

    def has_time_to_finish(self) -> bool:
        """Can the step that has begun be finished and saved? For before its first update."""
        return self._has_time(max(self._step_seconds - self._elapsed(), self._update_seconds))

    def _elapsed(self) -> float:
        return self.clock() - self._begun

    def _has_time(self, seconds: float) -> bool:
        if not self.look():
            return True
        save = self.grace_seconds / 2 if self.save_seconds is None else self.save_seconds
        return self.clock() + max(seconds, 0.0) + save <= self._deadline


_FROM_UPDATES_ON = ("critic_update", "actor_update", "sync")
_NAMES = ("step", "evaluation", "checkpoint", "logprobs", *_FROM_UPDATES_ON)

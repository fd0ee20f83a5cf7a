"""Seconds and peak memory of each phase of a step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping

from vapo_megatron.config.phases import TIMED, Span
from vapo_megatron.parallel.memory import PeakMemory


class PhaseTimer:
    """Seconds and peak memory per phase of a step: `with timer("generation"): ...`.

    A nested phase counts only towards the outer one, so the phases never add up to more than the
    step.
    """

    def __init__(
        self,
        on_start: Callable[[str], None] | None = None,
        synchronize: Callable[[], None] | None = None,
        memory: PeakMemory | None = None,
    ):
        """Start the step's clock.

        Args:
            on_start: called with the name of each outer phase, such as `Progress.phase`.
            synchronize: waits for the accelerator, so that a phase's work counts towards it.
            memory: of this process; None: peaks are not measured.
        """
        self._on_start = on_start
        self._synchronize = synchronize or (lambda: None)
        self._memory = memory
        self._seconds: dict[str, float] = {}
        self._peaks: dict[str, int] = {}
        self._spans: list[Span] = []
        self._inside = False
        self._step_start = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the block's seconds to one of phases.TIMED."""
        assert phase in TIMED, f"unknown phase {phase!r}: add it to config/phases.py"
        if self._inside:
            yield
            return
        self._inside = True
        if self._on_start:
            self._on_start(phase)
        if self._memory:
            self._memory.restart()
        start, begin = time.perf_counter(), time.time()
        try:
            yield
            self._synchronize()
        finally:
            self._inside = False
            elapsed = time.perf_counter() - start
            self._seconds[phase] = self._seconds.get(phase, 0.0) + elapsed
            self._spans.append(Span(phase, 0, begin, time.time()))
            if self._memory:
                peak = self._memory.peak_bytes()
                self._peaks[phase] = max(self._peaks.get(phase, 0), peak)

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return `time/*_seconds` and this process's `memory/*_peak_bytes`; start the next step."""
        now = time.perf_counter()
        times = {f"time/{p}_seconds": self._seconds[p] for p in TIMED if p in self._seconds}
        times["time/step_seconds"] = now - self._step_start
        peaks = {f"memory/{p}_peak_bytes": self._peaks[p] for p in TIMED if p in self._peaks}
        self._seconds, self._peaks, self._step_start = {}, {}, now
        return times, peaks

    def take_spans(self, step: int) -> list[Span]:
        """Return when the outer phases since the last call were, as parts of a step."""
        spans, self._spans = self._spans, []
        return [span._replace(step=step) for span in spans]


def tokens_per_second(num_tokens: float, times: Mapping[str, float]) -> float:
    """Return num_tokens per second of a step, without evaluation and checkpoint.

    Args:
        num_tokens: response tokens of the step, summed over all processes.
        times: from `PhaseTimer.take`.
    """
    extra = (times.get(f"time/{phase}_seconds", 0.0) for phase in ("evaluation", "checkpoint"))
    seconds = times["time/step_seconds"] - sum(extra)
    return num_tokens / seconds if seconds > 0 else math.nan

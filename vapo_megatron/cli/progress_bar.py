"""How far a command is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


class ProgressBar:
    """One count that grows to its total, on standard error; a context manager."""

    def __init__(
        self, title: str, total: int, *, shown: bool = True, every_seconds: float = 10.0
    ) -> None:
        """Show nothing yet.

        Args:
            title: what is counted.
            total: where the count ends.
            shown: False on processes that say nothing.
            every_seconds: between two lines where standard error is no terminal; the first and the
                last count are always shown.
        """
        self._title, self._total = title, total
        self._every = every_seconds
        self._started = self._last = time.monotonic()
        self._shown = 0
        self._lines = shown and not sys.stderr.isatty()
        self._bar: Progress | None = None
        if shown and sys.stderr.isatty():
            columns: list[ProgressColumn] = [
                TextColumn("{task.description}"), BarColumn(),
                TextColumn("{task.completed:,.0f} / {task.total:,.0f}"), TimeRemainingColumn(),
            ]  # fmt: skip
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(title, total=total)

    def show(self, done: int) -> None:
        """Show a count."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        now = time.monotonic()
        if self._lines and (now - self._last >= self._every or done == self._total != self._shown):
            self._last, self._shown = now, done
            left = (now - self._started) / max(done, 1) * (self._total - done)
            line = (
                f"{self._title} {done:,} / {self._total:,}, {int(left) // 60}:{int(left) % 60:02}"
            )
            print(f"{line} left", file=sys.stderr, flush=True)

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

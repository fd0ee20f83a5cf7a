"""What a run shows while it goes on: a live display on a terminal, one line per step elsewhere.

On rank 0 `Progress` shows; on other ranks the same calls show nothing. While the display is live,
whatever else a process prints (libraries, C++ code, child processes) goes to a log file, on every
rank, so nothing tears it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from vapo_megatron.run.progress_view import RunState

Mode = Literal["auto", "live", "plain", "off"]


class Progress:
    """A run's display, a context manager."""

    def __init__(
        self,
        mode: Mode,
        total_steps: int,
        value_pretraining_steps: int,
        title: str = "",
        *,
        is_leader: bool = True,
        first_step: int = 1,
        log_path: str | Path | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Start showing.

        Args:
            mode: `logging.progress`.
            total_steps: N of "step k / N".
            value_pretraining_steps: the first of them, in which the critic alone trains.
            title: of the live display.
            is_leader: True on one rank: the others show nothing.
            first_step: the step that runs next, above 1 after a resume.
            log_path: where all other output of this process goes while the display is live; None
                leaves it. Ranks that share a terminal may share the file.
            console: where to show; None: standard output.
            clock: seconds; another one for tests.
        """
        if mode == "auto":
            live = console.is_terminal if console else _on_terminal()
            mode = "live" if live else "plain"
        self._state = RunState(total_steps, value_pretraining_steps, title, first_step, clock)
        self._live = mode == "live"
        self._print: Callable[[str], None] = _nowhere
        self._resources = contextlib.ExitStack()
        terminal: TextIO | None = None
        if self._live and log_path is not None:
            terminal = self._resources.enter_context(output_to(Path(log_path)))
            self._state.footer = f"all other output: {log_path}"
        if not is_leader or mode == "off":
            return
        if mode == "plain":
            self._print = _plain_printer(console)
            return
        console = console or Console(file=terminal, force_terminal=True)
        to_log = terminal is not None
        display = Live(
            self._state, console=console, redirect_stdout=not to_log, redirect_stderr=not to_log
        )
        self._resources.enter_context(display)
        # A process that is killed cannot bring a hidden cursor back.
        console.show_cursor(True)
        self._print = lambda text: console.print(Text(text))

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Say what the run does now, such as "generation"; done and total draw a bar."""
        self._state.set_activity(name, done, total)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Say that a step is finished, with its row of metrics.

        Args:
            step: 1..total_steps; 0 is the evaluation before training.
            metrics: by the names of `config/metrics.py`; what is missing or None is not shown.
        """
        self._state.finish_step(step, metrics)
        if not self._live:
            self._print(self._state.line(step, metrics))

    def note(self, text: str) -> None:
        """Show a line that stays, above the live display."""
        self._print(text)

    def close(self) -> None:
        """Leave the display as it stands and give the output back; may be called twice."""
        self._resources.close()
        self._print = _nowhere

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def output_to(log_path: Path) -> Iterator[TextIO]:
    """Send standard output and error of the whole process to a file; yield the old standard output.

    The file descriptors are replaced, not sys.stdout: C++ code, log handlers made earlier and child
    processes write to those.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    _flush()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    with os.fdopen(os.dup(saved[0]), "w", encoding=sys.stdout.encoding) as terminal:
        try:
            yield terminal
        finally:
            _flush()
            for descriptor, original in zip((1, 2), saved, strict=True):
                os.dup2(original, descriptor)
                os.close(original)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _on_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _plain_printer(console: Console | None) -> Callable[[str], None]:
    if console is None:
        return lambda text: print(text, flush=True)
    return lambda text: console.print(Text(text), soft_wrap=True)


def _nowhere(text: str) -> None:
    """Print nothing."""

"""A run's progress: a live display on a terminal, one line per step elsewhere.

While the display is live, all other output of every rank (libraries, C++ code, child processes)
goes to a log file, so that it cannot garble the display.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from rich import progress as rich_progress
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from vapo_megatron.config.metrics import accuracy_name

Mode = Literal["auto", "live", "plain", "off"]

_NLL = "NLL"
"""Label of the loss, which is shown where there is no reward."""
_FIGURES = (
    ("reward", "reward/mean", "+.3f"),
    (_NLL, "actor/positive_lm_loss", ".4f"),
    ("held-out NLL", "evaluation/nll_mean", ".4f"),
    ("length", "rollout/response_length_mean", ",.1f"),
    ("entropy", "actor/entropy", ".3f"),
    ("explained variance", "critic/explained_variance", ".3f"),
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("time per step", "time/step_seconds", "seconds"),
)
"""Label, metric and format of a step's figures."""
_SIGNS = "warning"
"""Label of a step's signs in the live display."""


class Progress:
    """A run's display; a context manager. Only the main rank shows anything."""

    def __init__(
        self,
        mode: Mode,
        total_steps: int,
        value_pretraining_steps: int,
        *,
        title: str = "",
        is_main: bool = True,
        first_step: int = 1,
        log_path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Show nothing yet.

        Args:
            mode: `logging.progress`.
            total_steps: N of "step k / N".
            value_pretraining_steps: how many of them, the first, train only the critic.
            title: of the live display.
            is_main: whether this is the main rank.
            first_step: above 1 after a resume.
            log_path: receives all other output while the display is live, and is required for that;
                ranks may share it.
            clock: seconds; tests pass their own.
        """
        if mode == "auto":
            on_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
            mode = "live" if on_terminal else "plain"
        self._mode, self._is_main = mode, is_main
        self._total_steps, self._pretraining_steps = total_steps, value_pretraining_steps
        self._title, self._log_path = title, log_path
        self._figures: dict[str, str] = {}
        """Of the live display, each as last measured."""
        self.note: Callable[[str], None] = _show_nothing
        """Shows a line that stays, above the live display."""
        self._resources = contextlib.ExitStack()
        self.bars = rich_progress.Progress(
            rich_progress.SpinnerColumn(),
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(bar_width=None),
            rich_progress.TextColumn("{task.fields[note]}", justify="right"),
            rich_progress.TimeElapsedColumn(),
            speed_estimate_period=float("inf"),  # Steps may take longer than rich's 30 seconds.
            get_time=clock,
            expand=True,
        )
        done = first_step - 1
        self._steps = self.bars.add_task(
            self._next_step(done), total=total_steps, completed=done, note=""
        )
        self._phase_name = "starting"
        self._phase = self.bars.add_task(self._phase_name, total=None, note="")

    def phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Show the current phase, such as "generation"; done and total fill its bar."""
        if name != self._phase_name:
            self.bars.remove_task(self._phase)
            self._phase_name = name
            self._phase = self.bars.add_task(name.replace("_", " "), total=None, note="")
        counts = f"{done or 0:,} / {total:,}" if total else ""
        self.bars.update(self._phase, total=total, completed=done or 0, note=counts)

    def step(self, step: int, metrics: Mapping[str, Any], signs: Sequence[str] = ()) -> None:
        """Show a finished step.

        Args:
            step: 1..total_steps; 0 is the evaluation before training.
            metrics: its row, by the names of `config/metrics.py`; missing ones are not shown.
            signs: labels of signs.py.
        """
        if step == self._pretraining_steps:
            # Policy steps take longer than those before: estimate their speed from scratch.
            self.bars.reset(self._steps, completed=step, note="")
        self.bars.update(self._steps, completed=step)
        left = self._time_left(step)
        self.bars.update(self._steps, description=self._next_step(step), note=left)
        if step == self._total_steps:
            self.phase("finished")
        figures = _figures(metrics)
        if self._mode == "plain":
            width = len(str(self._total_steps))
            parts = [f"step {step:>{width}}/{self._total_steps}", f"{self._kind(step):17}"]
            parts += [f"{label} {value}" for label, value in figures.items()]
            parts += [left] if left else []
            parts += [f"({'; '.join(signs)})"] if signs else []
            self.note("  ".join(parts).rstrip())
        if "accuracy" in figures:
            figures["accuracy"] += f" after step {step}" if step else " before training"
        self._figures.pop(_SIGNS, None)
        self._figures |= figures | ({_SIGNS: ", ".join(signs)} if signs else {})

    def __enter__(self) -> Progress:
        if self._mode == "live":
            assert self._log_path is not None, "a live display needs a log file"
            terminal = self._resources.enter_context(output_to(self._log_path))
            if self._is_main:
                console = Console(file=terminal, force_terminal=True)
                self._resources.enter_context(
                    Live(
                        console=console,
                        get_renderable=self._panel,
                        # Otherwise rich prints to the terminal what belongs in the log.
                        redirect_stdout=False,
                        redirect_stderr=False,
                    )
                )
                # A killed process could not show a hidden cursor again.
                console.show_cursor(True)
                self.note = lambda text: console.print(Text(text))
        elif self._mode == "plain" and self._is_main:
            self.note = lambda text: print(text, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.note = _show_nothing
        self._resources.close()

    def _kind(self, step: int) -> str:
        if step == 0:
            return "before training"
        return "value pretraining" if step <= self._pretraining_steps else "policy"

    def _next_step(self, done: int) -> str:
        step = min(done + 1, self._total_steps)
        return f"step {step} / {self._total_steps}  {self._kind(step)}"

    def _time_left(self, done: int) -> str:
        """rich's estimate; in value pretraining a lower bound, as policy steps take longer."""
        seconds = self.bars.tasks[0].time_remaining
        if not seconds:
            return ""
        is_bound = done < self._pretraining_steps < self._total_steps
        text = f"{seconds:.0f} s" if seconds < 60 else format_seconds(seconds)
        return f"{'> ' if is_bound else ''}{text} left"

    def _panel(self) -> Panel:
        figures = [
            Text.assemble((f"{label} ", "dim"), (value, "bold"))
            for label, value in self._figures.items()
        ]
        log = f"all other output: {self._log_path}"
        return Panel(
            Group(self.bars, Columns(figures, padding=(0, 3))),
            title=Text(self._title, style="bold"),
            title_align="left",
            subtitle=Text(log, style="dim", overflow="ellipsis", no_wrap=True),
            subtitle_align="right",
            border_style="dim",
            padding=(0, 1),
        )


@contextlib.contextmanager
def output_to(log_path: Path) -> Iterator[TextIO]:
    """Send standard output and error of the whole process to a file; yield the old standard output.

    Replaces the file descriptors, not sys.stdout: C++ code, log handlers that already exist and
    child processes write to those.
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


def format_seconds(seconds: float) -> str:
    """Return a duration for people: 0.42 s, 12.3 s, 4 m 05 s, 3 h 12 m, 2 d 04 h."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} m {rest:02} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours} h {minutes:02} m"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours:02} h"


def _figures(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Format what is shown of a step's row, by label; null and missing metrics are left out."""
    figures = {}
    for label, name, form in _FIGURES:
        value = metrics.get(name)
        if label == _NLL and "reward" in figures:
            continue
        if value is not None:
            figures[label] = format_seconds(value) if form == "seconds" else format(value, form)
    accuracy = accuracy_name(metrics)
    if accuracy and metrics[accuracy] is not None:
        figures["accuracy"] = f"{metrics[accuracy]:.3f}"
    return figures


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _show_nothing(text: str) -> None:
    """Stands in for `note` where nothing is shown."""

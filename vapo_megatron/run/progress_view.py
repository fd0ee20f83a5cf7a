"""A run while it goes on: the time left, and how it looks as a line or on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from vapo_megatron.config.metrics import accuracy_name

_RECENT = 8
_SPARKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_FIGURES = (
    ("reward", "reward/mean", "+.3f"),
    ("length", "rollout/response_length_mean", ",.1f"),
    ("entropy", "actor/entropy", ".3f"),
    ("explained variance", "critic/explained_variance", ".3f"),
    ("tokens/s", "tokens_per_second", ",.0f"),
    ("time per step", "time/step_seconds", "seconds"),
)
"""Label, metric and format of what is shown of a step."""


class RunState:
    """A run as far as it has come.

    The display's own thread draws it (`__rich__`) while the run changes it.
    """

    def __init__(
        self,
        total_steps: int,
        value_pretraining_steps: int,
        title: str = "",
        first_step: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Arguments as in `progress.Progress`."""
        self.total_steps = total_steps
        self.value_pretraining_steps = value_pretraining_steps
        self.title = title
        self.footer = ""
        self.next_step = first_step
        self._clock = clock
        self._started = self._step_started = clock()
        self._activity: tuple[str, int | None, int | None] = ("starting", None, None)
        self._shown: dict[str, float] = {}
        self._accuracies: list[tuple[int, float]] = []
        self._rewards: list[float] = []
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._evaluation_seconds = 0.0
        self._spinner = Spinner("dots", style="cyan")

    def set_activity(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Say what the run does now."""
        self._activity = (name.replace("_", " "), done, total)

    def finish_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take in a finished step's row of metrics."""
        found = {name: value for name, value in metrics.items() if value is not None}
        self._shown |= found
        accuracy = accuracy_name(found)
        if accuracy:
            self._accuracies.append((step, found[accuracy]))
        evaluation = found.get("time/evaluation_seconds", 0.0)
        self._evaluation_seconds = evaluation or self._evaluation_seconds
        if step > 0:
            if "reward/mean" in found:
                self._rewards.append(found["reward/mean"])
            if "time/step_seconds" in found:
                of_kind = self._seconds[self._is_pretraining(step)]
                of_kind.append(found["time/step_seconds"] - evaluation)
            self.next_step = step + 1
        self._step_started = self._clock()
        self._activity = ("", None, None)

    def seconds_left(self) -> tuple[float, bool] | None:
        """Return (seconds left, whether that is a lower bound), None while nothing is known.

        The mean of recent steps, value-pretraining and policy steps apart, plus one evaluation if
        there was one before. Until a policy step has been seen, it counts as a value-pretraining
        step and the result is a lower bound.
        """
        pretraining = max(0, self.value_pretraining_steps - self.next_step + 1)
        policy = max(0, self.total_steps - max(self.value_pretraining_steps, self.next_step - 1))
        if not pretraining + policy:
            return 0.0, False
        of_pretraining, of_policy = self._mean_seconds(True), self._mean_seconds(False)
        is_bound = of_policy is None and policy > 0
        if of_policy is None:
            of_policy = of_pretraining
        if of_pretraining is None:
            of_pretraining = of_policy
        if of_pretraining is None or of_policy is None:
            return None
        current = of_pretraining if pretraining else of_policy
        gone = min(current, self._clock() - self._step_started)
        steps = pretraining * of_pretraining + policy * of_policy
        return steps - gone + self._evaluation_seconds, is_bound

    def line(self, step: int, metrics: Mapping[str, Any]) -> str:
        """Return a finished step as one line."""
        width = len(str(self.total_steps))
        parts = [f"step {step:>{width}}/{self.total_steps}", f"{self._kind(step):17}"]
        for label, name, form in _FIGURES:
            if metrics.get(name) is not None:
                parts.append(f"{label} {_format(metrics[name], form)}")
        if self._accuracies and self._accuracies[-1][0] == step:
            parts.append(f"accuracy {self._accuracies[-1][1]:.3f}")
        left = self.seconds_left()
        if left and step < self.total_steps:
            parts.append(f"{_left_text(left)} left")
        return "  ".join(parts)

    def __rich__(self) -> RenderableType:
        rows = [self._bars(), Text(""), self._figures()]
        if self._accuracies:
            rows.append(self._accuracy())
        if len(self._rewards) > 1:
            rows.append(self._spark())
        footer = Text(self.footer, style="dim", overflow="ellipsis", no_wrap=True)
        return Panel(
            Group(*rows),
            title=Text(self.title, style="bold") if self.title else None,
            title_align="left",
            subtitle=footer if self.footer else None,
            subtitle_align="right",
            border_style="dim",
            padding=(0, 1),
        )

    def _is_pretraining(self, step: int) -> bool:
        return step <= self.value_pretraining_steps

    def _kind(self, step: int) -> str:
        if step == 0:
            return "before training"
        return "value pretraining" if self._is_pretraining(step) else "policy"

    def _mean_seconds(self, pretraining: bool) -> float | None:
        # The first step of a kind warms up kernels and caches: it counts only while it is alone.
        known = self._seconds[pretraining]
        recent = known[1:][-_RECENT:] or known
        return sum(recent) / len(recent) if recent else None

    def _bars(self) -> RenderableType:
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(no_wrap=True, min_width=20)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True, justify="right", min_width=11)
        step = min(self.next_step, self.total_steps)
        left = self.seconds_left()
        table.add_row(
            Text.assemble(
                ("step ", "dim"),
                (f"{step}", "bold"),
                (f" / {self.total_steps}  ", "dim"),
                self._kind(max(1, step)),
            ),
            ProgressBar(
                total=max(1, self.total_steps), completed=self.next_step - 1, complete_style="cyan"
            ),
            Text(f"{_left_text(left)} left" if left and left[0] > 0 else "", style="bold"),
        )
        so_far = format_seconds(round(self._clock() - self._started))
        elapsed = Text(f"{so_far} so far", style="dim")
        name, done, total = self._activity
        if not name and self.next_step > self.total_steps:
            table.add_row(Text("finished", style="green"), "", elapsed)
        elif total:
            bar = ProgressBar(total=total, completed=done or 0, complete_style="green")
            table.add_row(self._spin(name), bar, Text(f"{done or 0:,} / {total:,}", style="dim"))
        else:
            table.add_row(self._spin(name), "", elapsed)
        return table

    def _spin(self, name: str) -> Spinner:
        self._spinner.text = Text(name or "between phases", overflow="ellipsis", no_wrap=True)
        return self._spinner

    def _figures(self) -> RenderableType:
        cells = []
        for label, name, form in _FIGURES:
            value = _format(self._shown[name], form) if name in self._shown else "-"
            cells.append(Text.assemble((f"{label} ", "dim"), (value, "bold")))
        return Columns(cells, padding=(0, 3))

    def _accuracy(self) -> RenderableType:
        (first_step, first), (step, last) = self._accuracies[0], self._accuracies[-1]
        when = f"after step {step}" if step else "before training"
        when += f", {first:.3f} before training" if step and first_step == 0 else ""
        return Text.assemble(("accuracy ", "dim"), (f"{last:.3f} ", "bold"), (when, "dim"))

    def _spark(self) -> RenderableType:
        values = self._rewards[-60:]
        low, high = min(values), max(values)
        scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
        bars = "".join(_SPARKS[round((value - low) * scale)] for value in values)
        text = Text("reward ", style="dim", no_wrap=True, overflow="ellipsis")
        text.append(bars, style="cyan")
        text.append(f" {low:+.2f} to {high:+.2f}", style="dim")
        return text


def format_seconds(seconds: float) -> str:
    """Return a duration as people read it: 0.42 s, 12.3 s, 4 m 05 s, 3 h 12 m, 2 d 04 h."""
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


def _left_text(left: tuple[float, bool]) -> str:
    seconds, is_bound = left
    text = f"{seconds:.0f} s" if seconds < 59.5 else format_seconds(seconds)
    return f"> {text}" if is_bound else text


def _format(value: float, form: str) -> str:
    return format_seconds(value) if form == "seconds" else format(value, form)

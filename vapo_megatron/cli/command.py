"""What all commands share: option parsing, exit codes, the progress bar, and their processes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from vapo_megatron.errors import INTERRUPTED, ConfigError, UserError, report

if TYPE_CHECKING:
    from rich.progress import Progress


class Parser(argparse.ArgumentParser):
    """Prints descriptions as they are written; a wrong option is a ConfigError."""

    def __init__(self, **options: Any) -> None:
        def formatter(prog: str) -> argparse.HelpFormatter:
            return argparse.RawDescriptionHelpFormatter(prog, width=100)

        super().__init__(formatter_class=formatter, **options)
        self._positionals.title = "arguments"

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print, without the usage."""
        raise ConfigError(f"{message}; --help lists the options")


def add_values(
    group: argparse._ActionsContainer,
    kind: Callable[[str], Any],
    metavar: str,
    *options: tuple[str, Any, str],
    **common: Any,
) -> None:
    """Add options that take a value of one kind, each as (name, default, help)."""
    for name, default, text in options:
        group.add_argument(name, type=kind, metavar=metavar, default=default, help=text, **common)


def run(
    command: str,
    work: Callable[[], object],
    *,
    interrupted: str,
    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
) -> int:
    """Do the work; rank 0 prints the result, unless it is None or an exit code.

    Args:
        command: prefix of each line on standard error.
        work: also parses the command line, so that its mistakes are reported alike.
        interrupted: what an interrupt leaves behind, for the user.
        signals: each ends the work as Ctrl-C does.

    Returns:
        The exit code: the work's own, or 0; 2 after a UserError or OSError, which is one line; 130
        when interrupted.
    """
    caught = []

    def interrupt(*_: Any) -> None:
        caught.append(True)
        raise KeyboardInterrupt

    earlier = {s: signal.signal(s, interrupt) for s in signals}
    try:
        result = work()
    except BaseException as error:
        # Compiled code may turn the interrupt into another exception.
        if caught:
            report(f"{command}: interrupted; {interrupted}", INTERRUPTED)
            return INTERRUPTED
        if isinstance(error, (UserError, OSError)):
            report(f"{command}: {error}", 2)
            return 2
        # Python prints the traceback by itself; under torchrun it must reach the error file.
        if not under_torchrun() or isinstance(error, SystemExit):
            raise
        report(f"{command}: {type(error).__name__}: {error}", 1, traceback.format_exc())
        return 1
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    if isinstance(result, int):
        return result
    if result is not None and is_first_rank():
        print(result)
    return 0


def under_torchrun() -> bool:
    """Did torchrun start this process? RANK alone may be a cluster's number of a node."""
    return "LOCAL_RANK" in os.environ


def is_first_rank() -> bool:
    """Is this rank 0, or the only process?"""
    return not under_torchrun() or os.environ.get("RANK", "0") == "0"


class ProgressBar:
    """A count on its way to a total, on standard error: a bar on a terminal, else lines.

    Rank 0 shows it. Nothing is shown of work that is done within `after_seconds`.
    """

    def __init__(
        self,
        title: str,
        *,
        unit: int = 1,
        after_seconds: float = 2.0,
        every_seconds: float = 10.0,
    ) -> None:
        """Show nothing yet; the first count starts the clock.

        Args:
            title: what is counted.
            unit: the title's, in what `show` is given.
            after_seconds: until the bar, or the first line.
            every_seconds: between two lines; the last count always has one if any had.
        """
        self._title, self._unit, self._every = title, unit, every_seconds
        self._after = after_seconds if is_first_rank() else float("inf")
        self._started = self._due = float("inf")
        self._last: int | None = None
        self._bar: Progress | None = None

    def show(self, done: int, total: int) -> None:
        """Show a count that ends at `total`."""
        now, count, end = time.monotonic(), done // self._unit, total // self._unit
        if self._started > now:
            self._started, self._due = now, now + self._after
        is_due = now >= self._due and done < total
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=count, total=end)
        elif is_due and sys.stderr.isatty():
            self._bar = _terminal_bar()
            self._bar.add_task(self._title, total=end, completed=count)
            self._bar.start()
        elif is_due or self._last not in (None, count) and done == total:
            self._due, self._last = now + self._every, count
            left = int((now - self._started) / max(done, 1) * (total - done))
            line = f"{self._title} {count:,} / {end:,}"
            if now > self._started:  # Of the first count it is not known how long it took.
                line += f", {left // 60}:{left % 60:02} left"
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _terminal_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    count = TextColumn("{task.completed:,.0f} / {task.total:,.0f}")
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))

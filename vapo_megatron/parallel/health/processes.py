"""The processes that a process has started, for when it has to end without warning."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import NoReturn


def descendants(process: int) -> list[int]:
    """Return the ids of all processes that a process has started, and those that they have."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name before the last parenthesis may hold any bytes.
            parent = int(stat.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    family = [process]
    for one in family:
        family += children.get(one, [])
    return family[1:]


def end_now(code: int) -> NoReturn:
    """End this process and all that it has started, without the libraries' own farewells."""
    try:
        end_children()
    finally:
        os._exit(code)


def end_children() -> None:
    """Kill all processes that this one has started, and theirs."""
    for process in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)

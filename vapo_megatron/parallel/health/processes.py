"""Kill this process and its descendants immediately."""

from __future__ import annotations

import contextlib
import os
from typing import NoReturn


def end_now(code: int) -> NoReturn:
    """Kill all descendants and exit; skips atexit handlers."""
    try:
        end_children()
    finally:
        os._exit(code)


def end_children() -> None:
    """Kill all descendants of this process."""
    # Not at the top: a launcher without its requirements says which is missing.
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # It may have exited.
            process.kill()

"""What the two conversion commands share: arguments, exit codes, and an end that leaves nothing."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vapo_megatron.errors import UserError


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --out and --overwrite."""
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="made whole under this name, or not at all"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier conversion; nothing else is"
    )


def run(command: str, convert: Callable[[], Path]) -> int:
    """Convert and say where; SIGTERM ends it as Ctrl-C does.

    Returns:
        The exit code: 0; 2 with one line after an error that the user can put right; 130 when
        interrupted.
    """
    is_main = os.environ.get("RANK", "0") == "0"
    interrupted = []

    def interrupt(*_: Any) -> None:
        interrupted.append(True)
        raise KeyboardInterrupt

    earlier = {s: signal.signal(s, interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        out = convert()
    except BaseException as error:
        # An interrupt may reach us as another exception, out of compiled code that was at work.
        if interrupted:
            print(f"{command}: interrupted; nothing is left under --out", file=sys.stderr)
            return 130
        if not isinstance(error, (UserError, OSError)):
            raise
        if is_main:
            print(f"{command}: {error}", file=sys.stderr)
        return 2
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    if is_main:
        print(out)
    return 0

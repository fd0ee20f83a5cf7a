"""User errors, as opposed to bugs: they end the program with one line and exit code 2.

A process's last words go through `report`. Under our own torchrun (cli/torchrun.py) they wait in
torch's error file, and the launcher prints those of the first process that failed, once all have
ended: so they are the last thing on the screen. Elsewhere they are printed at once.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import TextIO

LAUNCHER = "VAPO_LAUNCHER"
"""Environment variable: process id of the launcher that prints its workers' last words."""
INTERRUPTED = 130
"""Exit code after SIGINT, as a shell has it."""


class UserError(ValueError):
    """A mistake that the user can fix; the message has the field, its value, rule and remedy."""


class ConfigError(UserError):
    """An invalid configuration field, file or combination of fields."""


class DataError(UserError):
    """Invalid prompt data; the message has the file or text, the row and the remedy."""


class CheckpointError(UserError):
    """A checkpoint or HF directory that cannot be loaded; the message has the tensor or file."""


class Stopped(Exception):
    """The run was told to stop and has no time to finish the step; raised on every rank."""


def tell(mistake: str, file: TextIO | None = None) -> None:
    """Print a user error or warning once per node, from the first process that reports it.

    Rank 0 cannot print for all: its node may be fine. A fixed local rank cannot either: torchrun
    kills a node's other processes as soon as one fails, possibly before they have printed.

    Args:
        mistake: one line.
        file: None: standard error.
    """
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # torchrun's directory for this node and restart: ATTEMPT/LOCAL_RANK/error.json.
        told = Path(error_file).parents[1] / f"told_{zlib.crc32(mistake.encode()):08x}"
        try:
            told.touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:
            pass  # The disk is full or the directory gone: better printed twice than never.
    print(mistake, file=file or sys.stderr, flush=True)


def report(line: str, code: int, trace: str = "", file: TextIO | None = None) -> None:
    """Say why this process ends.

    Args:
        line: the reason.
        code: exit code that the command shall have: 2 for a user's mistake, 1 for a bug.
        trace: of a bug.
        file: None: standard error.
    """
    has_reported.set()
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    is_recorded = bool(error_file) and _record(Path(str(error_file)), line, code, trace)
    if is_recorded and _is_last_start() and os.environ.get(LAUNCHER) == str(os.getppid()):
        return
    file = file or sys.stderr
    # The live display of a run that ends at once leaves the cursor behind its last line.
    lines = [*[""] * file.isatty(), *[trace.rstrip()] * bool(trace), line]
    tell("\n".join(lines), file)


has_reported = threading.Event()
"""Nothing more is to be said of an error that is a consequence."""


def _record(file: Path, line: str, code: int, trace: str) -> bool:
    """Write the error file, of which torch's report shows py_callstack; return whether it could."""
    now = time.time()
    extra = {"py_callstack": line, "timestamp": str(int(now))}
    own = {"line": line, "code": code, "trace": trace, "time": now}
    try:
        file.write_text(json.dumps({"message": {"message": line, "extraInfo": extra}, "own": own}))
    except OSError:
        return False
    return True


def _is_last_start() -> bool:
    """Will torchrun not start this process again if it fails?"""
    done, most = (
        int(os.environ.get(f"TORCHELASTIC_{name}", "0"))
        for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    return done >= most

"""User errors, as opposed to bugs: they end the program with one line and exit code 2."""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path
from typing import TextIO


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

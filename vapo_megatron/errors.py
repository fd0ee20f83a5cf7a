"""Errors that a user can cause, told apart from bugs, and how they are told.

They end the program with exit code 2 and one line.
"""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path
from typing import TextIO


class UserError(ValueError):
    """Something that a user can put right; the message names what, its value, rule and remedy."""


class ConfigError(UserError):
    """A configuration field, file or combination of fields that cannot work."""


class DataError(UserError):
    """Prompt data that cannot be used: the message names the file or text, row, and remedy."""


class CheckpointError(UserError):
    """A checkpoint or HF directory that cannot be loaded: the message names the tensor or file."""


class Stopped(Exception):
    """There is no time left to finish the step; raised on every rank alike."""


def tell(mistake: str, file: TextIO | None = None) -> None:
    """Print a mistake once on each node that has it: the first of its processes to meet it does.

    Not the first rank: its node may be in order, and torchrun ends a node's other processes as soon
    as one has failed, perhaps before they could speak.

    Args:
        mistake: a line.
        file: where to; None: standard error.
    """
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # In torchrun's own directory of this attempt on this node: ATTEMPT/LOCAL_RANK/error.json.
        told = Path(error_file).parents[1] / f"told_{zlib.crc32(mistake.encode()):08x}"
        try:
            told.touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:
            pass  # The directory is full or gone: told more than once rather than never.
    print(mistake, file=file or sys.stderr, flush=True)

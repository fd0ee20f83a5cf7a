"""Keeps other processes away from what one writes: a run directory, an evaluation's file."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from vapo_megatron.errors import DataError, tell

LOCK_FILE, LOCK_SECONDS = ".lock", 30.0
"""In a run directory, locked by the run; time for what is left of a killed run to be gone."""


def lock_run(run_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Keep other runs out of a run directory in the body.

    Raises:
        DataError: another run goes on there, and does so after LOCK_SECONDS.
    """
    return locked(run_dir / LOCK_FILE, _refusal(run_dir), LOCK_SECONDS)


def check_not_in_use(run_dir: Path) -> None:
    """Refuse what lock_run would; any number of processes may ask at once."""
    if (run_dir / LOCK_FILE).exists():
        _lock(run_dir / LOCK_FILE, fcntl.LOCK_SH, _refusal(run_dir), LOCK_SECONDS).close()


def _refusal(run_dir: Path) -> str:
    return (
        f"logging.run_dir={run_dir}: another run goes on there; end it, or set another directory "
        f"(where its machine is gone and nothing goes on, remove {run_dir / LOCK_FILE})"
    )


@contextlib.contextmanager
def locked(file: Path, refusal: str, patience_seconds: float = 0.0) -> Iterator[None]:
    """Keep other processes away in the body, by a file that is there as long; makes its directory.

    On a file system without locks a line says so, and nothing is kept away.

    Raises:
        DataError: refusal; another process has locked it, and has so after patience_seconds.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with _lock(file, fcntl.LOCK_EX, refusal, patience_seconds):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _lock(path: Path, kind: int, refusal: str, patience_seconds: float) -> BinaryIO:
    """Return the open file, locked until it is closed."""
    deadline = time.monotonic() + patience_seconds
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            # Its last owner may just have removed it.
            if os.fstat(file.fileno()).st_nlink > 0:
                return file
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            tell(f"warning: {path.parent} has no file locks: nothing keeps a second writer away")
            return file
        file.close()
        if time.monotonic() >= deadline:
            raise DataError(refusal)
        time.sleep(0.2)

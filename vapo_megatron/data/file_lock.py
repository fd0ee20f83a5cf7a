"""Keeps other processes away from what one writes: a run directory, an evaluation's file."""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from vapo_megatron.errors import DataError, tell

LOCK_FILE, LOCK_SECONDS = ".lock", 30.0
"""In a run directory, locked by the run; time for what is left of a killed run to be gone."""


def lock_run(run_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Keep other runs out of a run directory in the body.

    Raises:
        DataError: another run goes on there, and does so after LOCK_SECONDS.
    """
    refusal = (
        f"logging.run_dir={run_dir}: another run goes on there; end it, or set another directory "
        f"(where its machine is gone and nothing goes on, remove {run_dir / LOCK_FILE})"
    )
    return locked(run_dir / LOCK_FILE, refusal, LOCK_SECONDS)


def check_not_in_use(run_dir: Path) -> None:
    """Refuse what lock_run would; any number of processes may ask at once."""
    if (run_dir / LOCK_FILE).exists():
        with lock_run(run_dir):
            pass


@contextlib.contextmanager
def locked(file: Path, refusal: str, patience_seconds: float = 0.0) -> Iterator[None]:
    """Keep other processes away in the body, by a file that is there as long; makes its directory.

    On a file system without locks a line says so, and nothing is kept away.

    Raises:
        DataError: refusal; another process has locked it, and has so after patience_seconds.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # Ranks that ask at once have it for a moment each: their attempts are not to keep in step.
    pause_seconds = random.uniform(0.1, 0.3)
    lock = FileLock(file, patience_seconds, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(poll_interval=pause_seconds)
    except Timeout:
        raise DataError(refusal) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        tell(f"warning: {file.parent} has no file locks: nothing keeps a second writer away")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        lock.release()

"""Locks against other writers: of a run directory, and of single files.

The lock is flock's, so the kernel frees it with its last process. What the file says of the holder
only decides whether waiting can help, and what a refusal names.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vapo_megatron.errors import DataError, tell

LOCK_FILE, LOCK_SECONDS = ".lock", 30.0
"""A run locks this file of its run directory; time for a killed run's processes to disappear."""
_QUIET_SECONDS = 1.0
"""How long to wait before saying so: ranks that check at once disturb each other only briefly."""
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL)
_AS_WRITER, _AS_READER = fcntl.LOCK_EX, fcntl.LOCK_SH


def lock_run(run_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Lock a run directory during the body.

    Raises:
        DataError: a run that is alive holds it; or LOCK_SECONDS did not suffice for one that is
            not, or that this machine cannot see.
    """
    return locked(run_dir / LOCK_FILE, _refusal(run_dir), LOCK_SECONDS)


def check_not_in_use(run_dir: Path) -> None:
    """Raise DataError if lock_run would; many processes may check at once, and write nothing."""
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(run_dir / LOCK_FILE, os.O_RDONLY)
        try:
            _wait(run_dir / LOCK_FILE, handle, _AS_READER, _refusal(run_dir), LOCK_SECONDS)
        finally:
            os.close(handle)


@contextlib.contextmanager
def locked(file: Path, refusal: str, timeout_seconds: float = 0.0) -> Iterator[None]:
    """Hold a lock file during the body; its directory is created, the file is removed after it.

    A file system without locks gets a warning, and no lock.

    Args:
        file: says who holds the lock while it is held.
        refusal: the error; "{holder}" in it becomes who that is.
        timeout_seconds: how long to wait for a holder that is not known to be alive.

    Raises:
        DataError: refusal.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = _open_locked(file, refusal, timeout_seconds)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(handle)


def _refusal(run_dir: Path) -> str:
    return (
        f"logging.run_dir={run_dir}: another run is using it{{holder}}; stop that run, or set "
        f"another directory (if its machine is gone, remove {run_dir / LOCK_FILE})"
    )


def _open_locked(file: Path, refusal: str, timeout_seconds: float) -> int:
    """Open and lock a file, and say in it who did; the lock ends when the handle is closed."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _wait(file, handle, _AS_WRITER, refusal, timeout_seconds)
            if os.fstat(handle).st_nlink:
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(_this_process()).encode(), 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # Its holder has removed it meanwhile: lock the file of that name now.


def _wait(file: Path, handle: int, kind: int, refusal: str, timeout_seconds: float) -> None:
    """Lock an open file. Raises DataError: see locked."""
    start, has_told = time.monotonic(), False
    while True:
        try:
            return fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return tell(
                    f"warning: {file.parent} does not support file locks: do not start a second "
                    "writer"
                )
            if error.errno not in _HELD:
                raise
        holder, waited = _holder(file), time.monotonic() - start
        if _is_alive(holder) or waited >= timeout_seconds:
            raise DataError(refusal.replace("{holder}", _describe(holder)))
        if waited > _QUIET_SECONDS and not has_told:
            has_told = True
            tell(
                f"waiting up to {timeout_seconds:.0f} s for {file}, which another run may still "
                f"hold{_describe(holder)}"
            )
        # Random pauses keep processes that ask at once out of step.
        time.sleep(random.uniform(0.1, 0.3))


def _this_process() -> dict[str, Any]:
    # torchrun's processes are of no use without it: they end soon after it has.
    agent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return {"pid": os.getpid(), "agent": agent, "host": socket.gethostname(), "since": since}


def _holder(file: Path) -> dict[str, Any]:
    """Return what _this_process of the holder wrote; empty: unknown."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    is_complete = isinstance(found, dict) and all(
        isinstance(found.get(name), kind)
        for name, kind in (("pid", int), ("agent", int), ("host", str), ("since", str))
    )
    return found if is_complete else {}


def _is_alive(holder: dict[str, Any]) -> bool:
    """Is it known to go on? What runs on another machine, or is ending, is not."""
    if not holder or holder["host"] != socket.gethostname():
        return False
    return _goes_on(holder["pid"]) and _goes_on(holder["agent"])


def _goes_on(pid: int) -> bool:
    """Whether the process is alive and not being stopped (runs leave signals pending)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    pending = int(status["SigPnd"], 16) | int(status["ShdPnd"], 16)
    told = any(pending >> (number - 1) & 1 for number in _ENDING)
    return status["State"][0] not in "ZX" and not told


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return ""
    return f" (process {holder['pid']} on {holder['host']}, since {holder['since']})"

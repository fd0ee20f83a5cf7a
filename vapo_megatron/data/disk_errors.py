"""Why a path cannot be written, in one line with the remedy, and how much room its disk has."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from vapo_megatron.errors import UserError

NO_ROOM = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "raise the limit on a file's size (ulimit -f)",
}
"""What to do against a full disk, an exhausted quota and a limit, by errno."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the body, which writes `path`, into an error with a remedy.

    If only some ranks fail, the watchdog ends the others.

    Raises:
        UserError: names the path and the remedy.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{describe_write_error(path, error)} and restart: a run resumes from its latest "
            "checkpoint"
        ) from None


def describe_write_error(
    path: Path,
    error: OSError,
    num_bytes: int | None = None,
    *,
    unfinished: Iterable[Path] = (),
    remedy: str = NO_ROOM[errno.ENOSPC],
) -> str:
    """Return in one line why a path cannot be written, and the remedy.

    Args:
        path: of the file or directory.
        error: of the system.
        num_bytes: that it takes in all; None: unknown.
        unfinished: what is deleted after the error; it counts as free.
        remedy: against a full disk.
    """
    what = error.strerror or str(error)
    if error.errno not in NO_ROOM:
        return f"{path} cannot be written: {what}; fix that"
    told = [] if num_bytes is None else [f"it takes {num_bytes / 1e9:.3g} GB"]
    if error.errno != errno.ENOSPC:
        remedy = NO_ROOM[error.errno]
    elif (free := free_bytes(path, unfinished)) is not None:
        told.append(f"{free / 1e9:.3g} GB are free")
    more = f" ({', '.join(told)})" if told else ""
    return f"{path} cannot be written: {what}{more}; {remedy}"


def free_bytes(path: Path, deleted: Iterable[Path] = ()) -> int | None:
    """Return the free space of the file system on which `path` is or would be.

    Args:
        path: a file or directory.
        deleted: directories that count as free.

    Returns:
        None: unknown; some network file systems report a size of 0, or nothing.
    """
    try:
        usage = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists()))
    except OSError:
        return None
    return usage.free + sum(map(_size, deleted)) if usage.total else None


def _size(directory: Path) -> int:
    """Return the bytes on disk of a directory's files; another process may be deleting them."""
    size = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            size += path.lstat().st_blocks * 512
    return size

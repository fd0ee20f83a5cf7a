"""Crash-safe files: atomic replacement, durable appends, hashes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from vapo_megatron.errors import UserError

NO_ROOM = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "raise the limit on a file's size (ulimit -f)",
}
"""What to do against a full disk, an exhausted quota and a limit, by errno."""


class Abandoned(Exception):
    """The file is no longer wanted."""


class HashedFile:
    """A file that is hashed while it is written, and synced to disk when its `with` block ends.

    torch.save cannot handle a write error: `write` keeps it and drops what follows, `check` raises.
    """

    def __init__(self, path: Path, stop: threading.Event | None = None) -> None:
        """Create or replace the file, and its directory; `stop` is set when it is not wanted."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "wb", buffering=0)
        self._digest, self._stop = hashlib.sha256(), stop
        self._error: OSError | None = None
        self.num_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Append. Large pieces release the GIL while they are hashed and written."""
        rest = memoryview(data)
        self.num_bytes += rest.nbytes
        if self._error is None:
            try:
                self._digest.update(rest)
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError as error:
                self._error = error
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is unbuffered."""

    def check(self) -> None:
        """Raise OSError if a write has failed, Abandoned if the file is no longer wanted."""
        if self._error is not None:
            raise self._error
        if self._stop is not None and self._stop.is_set():
            raise Abandoned

    @property
    def sha256(self) -> str:
        """Of all bytes written."""
        return self._digest.hexdigest()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Sync to disk. Raises OSError or Abandoned: see check."""
        with self._file:
            if kind is None:
                self.check()
                os.fsync(self._file.fileno())


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that atomically replaces `path` after the body, unless it raises."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(file: Path, text: str) -> None:
    """Replace a file's content atomically. Raises UserError: see writing."""
    with writing(file), replacing(file) as out:
        out.write(text.encode())


def replace_directory(partial: Path, final: Path) -> None:
    """Sync a directory to disk and rename it; an earlier directory of that name is deleted last."""
    for path in [*partial.rglob("*"), partial]:
        sync(path)
    earlier = final.with_name(f".{final.name}.replaced")
    if earlier.exists():
        shutil.rmtree(earlier)
    if final.exists():
        final.rename(earlier)
    partial.rename(final)
    shutil.rmtree(earlier, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append(file: BinaryIO, records: Iterable[Mapping[str, Any]]) -> None:
    """Append one JSON line per record, and wait until they are on disk."""
    file.write("".join(map(to_line, records)).encode())
    file.flush()
    os.fsync(file.fileno())


def to_line(record: Mapping[str, Any]) -> str:
    """Return a record as one line of JSON. Numbers must be finite."""
    return json.dumps(record, allow_nan=False) + "\n"


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

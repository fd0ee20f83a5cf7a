"""Files and directories that a crash leaves whole: each appears, or grows, once it is on disk."""

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

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a full disk, a used-up quota or a limit on files gives as an error's number."""


class Abandoned(Exception):
    """Writing was to stop."""


class HashedFile:
    """A file that is hashed as it is written, and is on disk when its `with` block has ended.

    torch.save, which cannot bear an error of its file, does not get one: what follows is dropped,
    and `check` raises it.
    """

    def __init__(self, path: Path, stop: threading.Event | None = None) -> None:
        """Open it, and make its directory.

        Args:
            path: is replaced.
            stop: set when the file is not wanted any more.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "wb", buffering=0)
        self._digest, self._stop = hashlib.sha256(), stop
        self._error: OSError | None = None
        self.num_bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Append; in large pieces, for which other threads need not stand still."""
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
        """Nothing is held back."""

    def check(self) -> None:
        """See whether to go on.

        Raises:
            OSError: something could not be written.
            Abandoned: the file is not wanted any more.
        """
        if self._error is not None:
            raise self._error
        if self._stop is not None and self._stop.is_set():
            raise Abandoned

    @property
    def sha256(self) -> str:
        """Of what was written."""
        return self._digest.hexdigest()

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the disk.

        Raises:
            OSError: see check.
        """
        with self._file:
            if kind is None:
                self.check()
                os.fsync(self._file.fileno())


def sha256_of(path: Path) -> str:
    """Read a file and return its SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the path's place once it is on disk; none if the body raises.

    A reader, or a crash, sees the old content or the whole of the new.

    Raises:
        OSError: it cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def replace_file(file: Path, text: str) -> None:
    """Write a whole file; see replacing.

    Raises:
        UserError: see writing.
    """
    with writing(file), replacing(file) as out:
        out.write(text.encode())


def replace_directory(partial: Path, final: Path) -> None:
    """Give a directory its name once it is on disk; what had the name before disappears last.

    Raises:
        OSError: it cannot be done.
    """
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
    """Wait until a file's content, or a directory's list of names, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append(file: BinaryIO, records: Iterable[Mapping[str, Any]]) -> None:
    """Write records, a line each, and wait until they are on disk."""
    file.write("".join(map(to_line, records)).encode())
    file.flush()
    os.fsync(file.fileno())


def to_line(record: Mapping[str, Any]) -> str:
    """Return a record as one line of JSON. Numbers must be finite."""
    return json.dumps(record, allow_nan=False) + "\n"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write a file or directory in the body. Where one rank cannot, the watchdog ends all.

    Raises:
        UserError: in place of an OSError: names the path and the remedy.
    """
    try:
        yield
    except OSError as error:
        what, remedy = error.strerror or str(error), "put that right"
        if error.errno in NO_ROOM:
            what += f" ({free_bytes(path) / 1e9:.3g} GB are free)"
            remedy = "make room there"
        raise UserError(
            f"{path} cannot be written: {what}; {remedy}, and start it again: a run goes on from "
            "its latest checkpoint"
        ) from None


def free_bytes(path: Path) -> int:
    """Return the room on the disk where a file or directory is or would be."""
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free

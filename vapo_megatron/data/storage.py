"""Crash-safe files: atomic replacement, durable appends, hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from vapo_megatron.data.disk_errors import writing


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

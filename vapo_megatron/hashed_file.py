"""Files that are hashed as they are written, and are on disk when they are closed."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path


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


def write_hashed(path: Path, content: bytes) -> str:
    """Write a file, wait until it is on disk, and return its SHA-256.

    Raises:
        OSError: it cannot be written.
    """
    with HashedFile(path) as out:
        out.write(content)
    return out.sha256


def sha256_of(path: Path) -> str:
    """Read a file and return its SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""The JSONL file of an evaluation: which one it is, then a problem with its samples on each line.

    {"evaluation": 1, "checkpoint": ..., "weights": ..., "problems": ..., "samples": 32, ...}
    {"prompt_index": 0, "prompt": ..., "answer": ..., "responses": [{"sample": 0, ...}, ...]}

It grows by whole problems, so that a killed evaluation goes on with those that are missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.errors import DataError
from vapo_megatron.evaluation_statistics import problem_values
from vapo_megatron.run_directory import to_line

FORMAT = 1
_FOR_PEOPLE = ("checkpoint", "data")
"""Paths: the same weights and problems may lie elsewhere when the evaluation goes on."""
_PIECES, _PIECE_BYTES = 64, 4096


class EvaluationFile:
    """An evaluation's file, open on one process; a context manager."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Begin the file, or go on with it: a line that a kill has left unfinished is dropped.

        Args:
            path: directories are made.
            header: what identifies the evaluation; JSON values.

        Raises:
            DataError: the file holds something else, or is being written by another process.
        """
        self.path = path
        self.values: dict[int, dict[str, float]] = {}
        """prompt_index -> problem_values of its samples."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            self._take()
            self._read({"evaluation": FORMAT, **header})
        except BaseException:
            self._file.close()
            raise

    def append(self, problems: Sequence[Mapping[str, Any]]) -> None:
        """Write finished problems, and wait until they are on disk."""
        self._file.write("".join(map(to_line, problems)).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._count(problems)

    def close(self) -> None:
        """Close; may be called twice."""
        self._file.close()

    def __enter__(self) -> EvaluationFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{self.path} is being written by another evaluation; wait for it, or give another "
                "--out"
            ) from None

    def _read(self, header: dict[str, Any]) -> None:
        """Take in what is there, and cut off what follows the last newline."""
        begin, end = to_line(header).encode(), 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                if number == 1 and not begin.startswith(line):
                    raise self._foreign()
                self._file.truncate(end)
                break
            end += len(line)
            found = self._object(number, line)
            if number == 1:
                self._compare(found, header)
            else:
                self._count([found])
        if end == 0:
            self._file.write(begin)

    def _foreign(self) -> DataError:
        return DataError(f"{self.path} is no evaluation's file; give another --out")

    def _compare(self, found: dict[str, Any], header: dict[str, Any]) -> None:
        if "evaluation" not in found:
            raise self._foreign()
        for name, value in header.items():
            if name not in _FOR_PEOPLE and found.get(name) != value:
                raise DataError(
                    f"{self.path} holds another evaluation: its {name} is {found.get(name)!r}, "
                    f"here it is {value!r}; give another --out, or remove the file to start again"
                )

    def _count(self, problems: Sequence[Mapping[str, Any]]) -> None:
        for problem in problems:
            self.values[problem["prompt_index"]] = problem_values(problem["responses"])

    def _object(self, number: int, line: bytes) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and (
                number == 1 or {"prompt_index", "responses"} <= set(found)
            ):
                return found
        raise DataError(
            f"{self.path}, line {number} is not as an evaluation writes it; give another --out, or "
            "remove the line"
        )


def weights_digest(hf_path: Path) -> str:
    """Identify the weights, configuration and tokenizer of an HF directory by their contents.

    Of each file the size and 64 evenly spread pieces of 4 KiB count: an optimizer step changes them
    all, and a directory of any size takes no time.
    """
    digest = hashlib.sha256()
    for path in sorted(hf_path.iterdir()):
        if path.suffix in (".safetensors", ".json", ".model", ".txt", ".jinja"):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            step = max(_PIECE_BYTES, -(-size // _PIECES))
            with path.open("rb") as file:
                for start in range(0, size, step):
                    file.seek(start)
                    digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:16]

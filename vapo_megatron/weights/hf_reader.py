"""Reads slices of an HF directory's tensors: one safetensors file, or several with an index."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vapo_megatron.errors import CheckpointError
from vapo_megatron.weights.copying import copy_exactly, read_exactly

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The types that weights may have, by safetensors' names."""


_PACKED = {
    # Newer checkpoints hold a layer's experts in one tensor, an expert's gate above its up.
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}


class _Part(NamedTuple):
    """One expert's matrix in a tensor of all experts, [experts, rows, columns]."""

    stored: str
    expert: int
    first_row: int
    num_rows: int


class HfReader:
    """Reads slices of an HF directory's tensors on demand.

    Experts that are packed into one tensor are read by the names that each would have alone.
    `bytes_read` counts the bytes of the slices returned so far.
    """

    def __init__(self, directory: str | Path, single: str = SINGLE_FILE):
        """Find the files. Raises CheckpointError when they, or the index, are not usable.

        Args:
            directory: with an index of files, or one file.
            single: its name.
        """
        self.directory = Path(directory)
        self.bytes_read = 0
        self._open: dict[str, Any] = {}
        self._slices: dict[str, Any] = {}
        self._plain: dict[str, tuple[BinaryIO, dict[str, int]]] = {}
        self._parts: dict[str, _Part] = {}
        self._packed_in: dict[str, str] = {}
        if (self.directory / INDEX_FILE).is_file():
            self._file_of = _read_index(self.directory / INDEX_FILE)
        elif (self.directory / single).is_file():
            self._file_of = dict.fromkeys(self._handle(single).keys(), single)
        else:
            raise CheckpointError(
                f"{self.directory} holds neither {single} nor {INDEX_FILE}; give a directory "
                "saved by save_pretrained (pickled .bin files are not read)"
            )
        for name in list(self._file_of):
            self._unpack(name)

    def _unpack(self, name: str) -> None:
        """Replace a tensor of all experts by the names of their matrices."""
        head, _, tail = name.partition(".experts.")
        if tail not in _PACKED:
            return
        size = self._slice(name).get_shape()
        parts = _PACKED[tail]
        if len(size) != 3 or size[1] % len(parts):
            return
        file, rows = self._file_of.pop(name), size[1] // len(parts)
        self._packed_in[name] = file
        for expert in range(size[0]):
            for i, part in enumerate(parts):
                own = f"{head}.experts.{expert}.{part}.weight"
                self._file_of[own] = file
                self._parts[own] = _Part(name, expert, i * rows, rows)

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor, from its file's header."""
        part = self._parts.get(name)
        if part is not None:
            return part.num_rows, self._slice(part.stored).get_shape()[2]
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the type as safetensors writes it: F32, BF16, F16, I64, ..."""
        part = self._parts.get(name)
        return str(self._slice(name if part is None else part.stored).get_dtype())

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the part [start, stop) of a tensor along dim, on the CPU; all of it by default."""
        size = list(self.shape(name))
        stop = size[dim] if stop is None else stop
        if start == stop:
            # safetensors refuses empty slices.
            size[dim] = 0
            return torch.empty(size, dtype=DTYPES[self.dtype(name)])
        bounds = [slice(0, length) for length in size]
        bounds[dim] = slice(start, stop)
        packed = self._parts.get(name)
        if packed is None:
            part = self._slice(name)[tuple(bounds)]
        else:
            rows = slice(packed.first_row + bounds[0].start, packed.first_row + bounds[0].stop)
            part = self._slice(packed.stored)[packed.expert, rows, bounds[1]]
        self.bytes_read += part.numel() * part.element_size()
        return part

    def read_rows(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` with rows of a tensor from `start` on, without mapping the file into memory.

        Args:
            start: the first row.
            out: [rows, ...], contiguous, of the tensor's type.

        Raises:
            CheckpointError: the file ends early.
        """
        assert out.is_contiguous() and out.dtype == DTYPES[self.dtype(name)]
        file, begin, _ = self._place(name, start)
        read_exactly(file, begin, out)
        self.bytes_read += out.nbytes

    def copy_rows(self, name: str, start: int, count: int, out: BinaryIO, place: int) -> None:
        """Copy rows of a tensor from `start` on into a file, at offset `place`.

        Raises:
            CheckpointError: the tensor's file ends early.
        """
        file, begin, row_bytes = self._place(name, start)
        copy_exactly(file, begin, out, place, count * row_bytes)
        self.bytes_read += count * row_bytes

    def _place(self, name: str, row: int) -> tuple[BinaryIO, int, int]:
        """Return a tensor's file, the offset of the row in it, and the bytes of a row."""
        file, begins = self._plain_file(self._file_of[name])
        row_bytes = math.prod(self.shape(name)[1:]) * DTYPES[self.dtype(name)].itemsize
        packed, stored = self._parts.get(name), name
        if packed is not None:
            stored = packed.stored
            row += packed.expert * self._slice(stored).get_shape()[1] + packed.first_row
        return file, begins[stored] + row * row_bytes, row_bytes

    def _plain_file(self, name: str) -> tuple[BinaryIO, dict[str, int]]:
        """Return a file and the offset of each of its tensors."""
        if name not in self._plain:
            self._handle(name)  # checks the header
            file = open(self.directory / name, "rb", buffering=0)
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            begins = {t: 8 + size + entry["data_offsets"][0] for t, entry in header.items()}
            self._plain[name] = (file, begins)  # type: ignore[assignment]
        return self._plain[name]

    def _slice(self, name: str) -> Any:
        if name not in self._slices:
            file = self._packed_in.get(name) or self._file_of[name]
            try:
                self._slices[name] = self._handle(file).get_slice(name)
            except SafetensorError as error:
                raise CheckpointError(
                    f"{self.directory / file}: no tensor {name} ({error}); the index does not fit"
                ) from None
        return self._slices[name]

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            path = self.directory / file
            try:
                self._open[file] = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{path} cannot be read as safetensors ({error}); fetch the file again"
                ) from None
        return self._open[file]


def _read_index(path: Path) -> dict[str, str]:
    """Return tensor name -> file name, refusing anything but plain file names of this directory."""
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        pairs = list(weight_map.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors index with a weight_map ({error!r}); fetch it again"
        ) from None
    for name, file in pairs:
        plain = isinstance(file, str) and Path(file).name == file and not {"\\", "\0"} & set(file)
        if not plain or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: {name} points to {file!r}, but must name a .safetensors file in the same "
                "directory; do not use this checkpoint"
            )
    return dict(pairs)

"""Slices of the tensors of an HF directory: one safetensors file, or several with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vapo_megatron.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The types that weights may have, by safetensors' names."""


class HfReader:
    """Slices of the tensors of an HF directory, read when asked for.

    `bytes_read` counts the bytes of the slices returned so far.
    """

    def __init__(self, directory: str | Path):
        """Find the files. Raises CheckpointError when they, or the index, are not usable."""
        self.directory = Path(directory)
        self.bytes_read = 0
        self._open: dict[str, Any] = {}
        self._slices: dict[str, Any] = {}
        if (self.directory / INDEX_FILE).is_file():
            self._file_of = _read_index(self.directory / INDEX_FILE)
        elif (self.directory / SINGLE_FILE).is_file():
            self._file_of = dict.fromkeys(self._handle(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise CheckpointError(
                f"{self.directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}; give a directory "
                "saved by save_pretrained (pickled .bin files are not read)"
            )

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor, from its file's header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the type as safetensors writes it: F32, BF16, F16, I64, ..."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the part [start, stop) of a tensor along dim, on the CPU; all of it by default."""
        source = self._slice(name)
        size = list(source.get_shape())
        stop = size[dim] if stop is None else stop
        if start == stop:
            # safetensors refuses empty slices.
            size[dim] = 0
            return torch.empty(size, dtype=DTYPES[self.dtype(name)])
        part = source[(slice(None),) * dim + (slice(start, stop),)]
        self.bytes_read += part.numel() * part.element_size()
        return part

    def _slice(self, name: str) -> Any:
        if name not in self._slices:
            file = self._file_of[name]
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors index with a weight_map ({error!r}); fetch it again"
        ) from None
    for name, file in pairs:
        plain = isinstance(file, str) and Path(file).name == file and "\\" not in file
        if not plain or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: {name} points to {file!r}, but must name a .safetensors file in the same "
                "directory; do not use this checkpoint"
            )
    return dict(pairs)

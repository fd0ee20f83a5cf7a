"""The files of a megatron-core distributed checkpoint, without megatron-core or process groups.

    .metadata           pickled torch.distributed.checkpoint.Metadata: each tensor's shape and the
                        location of its chunks
    __R_P.distcp        chunks of rank R written by process P, each in torch.save's format
    common.pt           the same on every rank
    metadata.json       the format's name and version

Tensors are read and written in blocks of rows; no code from a checkpoint is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from vapo_megatron.data.storage import HashedFile
from vapo_megatron.errors import CheckpointError
from vapo_megatron.parallel.checkpoint_metadata import METADATA_FILE, read_metadata, tensors_of
from vapo_megatron.weights.copying import Blocks, copy_exactly, read_exactly

_FORMAT_FILE, _COMMON_FILE = "metadata.json", "common.pt"
_FORMAT = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip
_CONTENT = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False}


@dataclasses.dataclass(frozen=True)
class Written:
    """A chunk or an object in a file."""

    key: str
    shape: tuple[int, ...] | None
    """Of the whole tensor; None for an object."""
    dtype: torch.dtype | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    num_bytes: int


def is_distributed_checkpoint(directory: str | Path) -> bool:
    """Tell a megatron-core distributed checkpoint from a Hugging Face directory."""
    return all(Path(directory, name).is_file() for name in (METADATA_FILE, _FORMAT_FILE))


def append_chunk(
    out: BinaryIO,
    key: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[Written, int]:
    """Append a chunk in torch.save's format; its data is a hole (zeros) to be filled later.

    Args:
        out: file open for reading and writing, unbuffered.
        key, shape: of the whole tensor.
        offsets, sizes: of the part in it.
        dtype: of its elements.

    Returns:
        The chunk, and the file offset of its data.
    """
    data = torch.empty(sizes, dtype=dtype)  # its memory is never touched
    begin = out.seek(0, os.SEEK_END)
    with torch.serialization.skip_data(), _own_errors():
        torch.save(data, out)
    num_bytes = out.seek(0, os.SEEK_END) - begin
    place = _data_place(out, begin, num_bytes, data.nbytes)
    name = Path(out.name).name
    return Written(key, shape, dtype, offsets, sizes, name, begin, num_bytes), place


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the OSError behind what torch.save makes of a failed write."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        raise (error if cause is None else cause) from None


def append_empty_objects(directory: Path, file: str, keys: Iterable[str]) -> list[Written]:
    """Append empty objects, as megatron-core's extra states are without FP8."""
    content = serialized([None])
    written = []
    with open(directory / file, "ab") as out:
        for key in keys:
            written.append(Written(key, None, None, (), (), file, out.tell(), len(content)))
            out.write(content)
    return written


def finish_checkpoint(directory: Path, written: Iterable[Written]) -> None:
    """Write the metadata, once every chunk is in the files."""
    tensors: dict[str, Any] = {}
    results = []
    for w in written:
        info = _StorageInfo(w.file, w.begin, w.num_bytes)
        if w.shape is None or w.dtype is None:
            tensors[w.key] = BytesStorageMetadata()
            index = MetadataIndex(w.key)
        else:
            tensor = tensors.setdefault(
                w.key,
                TensorStorageMetadata(TensorProperties(dtype=w.dtype), torch.Size(w.shape), []),
            )
            index = MetadataIndex(w.key, w.offsets, len(tensor.chunks))
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(w.offsets), torch.Size(w.sizes)))
        results.append(WriteResult(index, w.num_bytes, info))
    common = serialized({"content_metadata": dict(_CONTENT)})
    for file, content in format_files(common).items():
        (directory / file).write_bytes(content)
    FileSystemWriter(directory).finish(Metadata(tensors), [results])


def format_files(common: bytes) -> dict[str, bytes]:
    """Return the small files beside chunks and metadata; `common` is common.pt's content."""
    return {_COMMON_FILE: common, _FORMAT_FILE: json.dumps(_FORMAT).encode()}


def serialized(value: Any) -> bytes:
    """Return what torch.save writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write_chunks(
    out: HashedFile, file: str, chunks: Iterable[tuple[MetadataIndex, Tensor]]
) -> list[WriteResult]:
    """Write chunks in torch.save's format.

    Args:
        out: an open file.
        file: its name.
        chunks: each with its place in the full tensor; on any device.

    Returns:
        Their locations in the file, for FileSystemWriter.finish.

    Raises:
        OSError, Abandoned: see HashedFile.check.
    """
    results = []
    for index, tensor in chunks:
        data = tensor.detach().cpu()
        if data.untyped_storage().nbytes() != data.nbytes:  # torch.save would write all of it
            data = data.clone()
        begin = out.num_bytes
        torch.save(data, cast(IO[bytes], out))
        out.check()
        length = out.num_bytes - begin
        results.append(WriteResult(index, length, _StorageInfo(file, begin, length)))
    return results


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A stored part of a tensor's layer or expert: its rows and columns, and its location."""

    first_row: int
    num_rows: int
    first_column: int
    num_columns: int
    place: Any
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class ShardedReader:
    """Reads rows of the tensors of a distributed checkpoint of any layout."""

    def __init__(self, directory: str | Path) -> None:
        """Read the metadata.

        Raises:
            CheckpointError: it is missing, unreadable, or names files outside the directory.
        """
        self.directory = Path(directory)
        if not is_distributed_checkpoint(directory):
            raise CheckpointError(
                f"{directory} is not a megatron-core distributed checkpoint: it lacks "
                f"{METADATA_FILE} or {_FORMAT_FILE}; give the directory that holds them"
            )
        metadata = read_metadata(self.directory)
        self.tensors = tensors_of(metadata)
        self._places = metadata.storage_data
        self._files: dict[str, BinaryIO] = {}
        self._begins: dict[tuple[str, int], int] = {}
        self._chunks: dict[tuple[str, int | None], list[_Chunk]] = {}
        self._columns = Blocks()

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor."""
        return tuple(self.tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """Return a tensor's type."""
        return self.tensors[key].properties.dtype

    def check_files(self, keys: Iterable[str]) -> None:
        """Check that chunks cover each tensor and that each chunk is in a file.

        Raises:
            CheckpointError: names the tensor, what was expected and what was found.
        """
        sizes = {}
        for key in keys:
            tensor = self.tensors[key]
            found = sum(torch.Size(chunk.sizes).numel() for chunk in tensor.chunks)
            if found != tensor.size.numel():
                raise CheckpointError(
                    f"{self.directory}: {key}: expected {tensor.size.numel()} elements in its "
                    f"chunks, found {found}"
                )
            for chunk in tensor.chunks:
                place = self._place(key, tuple(chunk.offsets))
                path = self.directory / place.relative_path
                if path not in sizes:
                    sizes[path] = path.stat().st_size if path.is_file() else -1
                if place.offset + place.length > sizes[path]:
                    raise CheckpointError(
                        f"{path}: expected at least {place.offset + place.length} bytes for {key}, "
                        f"found {'no such file' if sizes[path] < 0 else sizes[path]}"
                    )

    def read_rows(self, key: str, index: int | None, start: int, out: Tensor) -> None:
        """Fill `out` with rows of a tensor from `start` on.

        Args:
            index: along its first dimension, where layers or experts are one.
            start: the first row that is wanted.
            out: [rows] or [rows, columns], contiguous, of the tensor's type.
        """
        num_read = 0
        for chunk, first, count, file, begin in self._parts(key, index, start, len(out)):
            target = out[first - start : first - start + count]
            num_read += count * chunk.num_columns
            if out.dim() == 1 or chunk.num_columns == out.shape[1]:
                read_exactly(file, begin, target)
                continue
            columns = self._columns.get((count, chunk.num_columns), out.dtype)
            read_exactly(file, begin, columns)
            target[:, chunk.first_column : chunk.first_column + chunk.num_columns] = columns
        assert num_read == out.numel(), f"{key}: {num_read} of {out.numel()} elements are stored"

    def has_whole_rows(self, key: str, index: int | None) -> bool:
        """Is every row of a tensor in one chunk, so that copy_rows can copy it?"""
        columns = (*self.shape(key)[0 if index is None else 1 :], 1)[1]
        return all(chunk.num_columns == columns for chunk in self._chunks_of(key, index))

    def copy_rows(
        self, key: str, index: int | None, start: int, count: int, out: BinaryIO, place: int
    ) -> None:
        """Copy rows of a tensor into a file at offset `place`; see has_whole_rows."""
        num_read = 0
        for chunk, first, rows, file, begin in self._parts(key, index, start, count):
            row_bytes = chunk.num_columns * self.dtype(key).itemsize
            size = rows * row_bytes
            copy_exactly(file, begin, out, place + (first - start) * row_bytes, size)
            num_read += rows
        assert num_read == count, f"{key}: {num_read} of {count} rows are stored"

    def _parts(
        self, key: str, index: int | None, start: int, count: int
    ) -> Iterator[tuple[_Chunk, int, int, BinaryIO, int]]:
        """Yield (chunk, first row, rows, file, offset) of the chunks with these rows."""
        for chunk in self._chunks_of(key, index):
            first = max(start, chunk.first_row)
            last = min(start + count, chunk.first_row + chunk.num_rows)
            if first < last:
                file, begin = self._data_of(key, chunk)
                skipped = (first - chunk.first_row) * chunk.num_columns
                yield chunk, first, last - first, file, begin + skipped * self.dtype(key).itemsize

    def _chunks_of(self, key: str, index: int | None) -> list[_Chunk]:
        if (key, index) not in self._chunks:
            skip = 0 if index is None else 1
            for chunk in self.tensors[key].chunks:
                offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
                if skip and sizes[0] != 1:
                    raise CheckpointError(
                        f"{self.directory}: {key}: a chunk has several layers or experts"
                    )
                of_layer = self._chunks.setdefault((key, offsets[0] if skip else None), [])
                row, column = (*offsets[skip:], 0)[:2]
                num_rows, num_columns = (*sizes[skip:], 1)[:2]
                place = self._place(key, offsets)
                of_layer.append(_Chunk(row, num_rows, column, num_columns, place, offsets, sizes))
        return self._chunks[key, index]

    def _place(self, key: str, offsets: tuple[int, ...]) -> Any:
        place = self._places.get(MetadataIndex(key, offsets))
        if place is None:
            raise CheckpointError(
                f"{self.directory}: {key} at {list(offsets)} is in no file; do not use this "
                "checkpoint"
            )
        return place

    def _data_of(self, key: str, chunk: _Chunk) -> tuple[BinaryIO, int]:
        """Return a chunk's file and the offset of its data."""
        name, offset = chunk.place.relative_path, chunk.place.offset
        if name not in self._files:
            self._files[name] = open(self.directory / name, "rb", buffering=0)
        file = self._files[name]
        if (name, offset) not in self._begins:
            try:
                begin = _check_saved(file, chunk, self.dtype(key))
            except (OSError, ValueError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile,
                    StopIteration) as error:  # fmt: skip
                raise CheckpointError(
                    f"{self.directory / name}: {key} at {list(chunk.offsets)} cannot be read "
                    f"({error or type(error).__name__}); fetch the file again"
                ) from None
            self._begins[name, offset] = begin
        return file, self._begins[name, offset]


def _check_saved(file: BinaryIO, chunk: _Chunk, dtype: torch.dtype) -> int:
    """Return the offset of a saved tensor's data, after checking shape and type."""
    view = _Part(file, chunk.place.offset, chunk.place.length)
    saved = torch.load(cast(IO[bytes], view), map_location="meta", weights_only=True)
    expected, found = (chunk.sizes, dtype), (tuple(saved.shape), saved.dtype)
    if expected != found or not saved.is_contiguous() or saved.storage_offset():
        raise ValueError(f"expected {list(chunk.sizes)} {dtype}, found {list(found[0])} {found[1]}")
    return _data_place(file, chunk.place.offset, chunk.place.length, saved.nbytes)


def _data_place(file: BinaryIO, begin: int, length: int, num_bytes: int) -> int:
    """Return the file offset of the data of a tensor that torch.save wrote at `begin`."""
    with zipfile.ZipFile(cast(IO[bytes], _Part(file, begin, length))) as archive:
        (entry,) = [e for e in archive.infolist() if e.filename.endswith("/data/0")]
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != num_bytes:
        raise ValueError(f"expected {num_bytes} plain bytes, found {entry.file_size}")
    header = os.pread(file.fileno(), 30, begin + entry.header_offset)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return begin + entry.header_offset + 30 + lengths


class _Part(io.RawIOBase):
    """Part of a file, as a file object."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Return the position in the part."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position in the part."""
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read at most to the end of the part."""
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        count = os.preadv(self._file.fileno(), [view], self._begin + self._at)
        self._at += count
        return count

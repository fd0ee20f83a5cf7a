"""Copies bytes between files and tensors in bounded memory."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from vapo_megatron.errors import CheckpointError

BLOCK_BYTES = 64 << 20
"""At most this much of a tensor is in memory at once, and as much again for a cut of it."""
# Linux 6.18 allocates large pages for larger writes, which is slower in a virtual machine: 4 GB
# took 1.6 s of kernel time in writes of 64 KB, 5.5 s in 256 KB, 12 s in 1 MB or more.
_WRITE_BYTES = 64 << 10
_NOT_BY_KERNEL = (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


class Blocks:
    """Reusable memory for one block of rows."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def get(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, valid until the next call."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if size > len(self._memory):
            # Not zeros: small tensors would pay for touching all of a block.
            self._memory = torch.empty(max(size, BLOCK_BYTES), dtype=torch.uint8)
        return self._memory[:size].view(dtype).view(*shape)


def row_blocks(num_rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, count) of consecutive rows that fit a block; at least one row."""
    step = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, num_rows, step):
        yield start, min(step, num_rows - start)


def read_exactly(file: BinaryIO, offset: int, out: Tensor) -> None:
    """Fill a contiguous CPU tensor with a file's bytes from `offset` on.

    Raises:
        CheckpointError: the file ends early.
    """
    view = out.reshape(-1).view(torch.uint8).numpy().data
    while view:
        count = os.preadv(file.fileno(), [view], offset)
        if not count:
            raise _too_short(file)
        view, offset = view[count:], offset + count


def write_exactly(file: BinaryIO, offset: int, data: Tensor) -> None:
    """Write a contiguous CPU tensor's bytes into a file from `offset` on."""
    assert data.is_contiguous()
    # Not through numpy, after which a storage can no longer be resized (offload.py).
    view = memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr())).cast("B")
    while view:
        count = os.pwrite(file.fileno(), view[:_WRITE_BYTES], offset)
        view, offset = view[count:], offset + count


def copy_exactly(
    source: BinaryIO, begin: int, target: BinaryIO, place: int, num_bytes: int
) -> None:
    """Copy bytes from file to file, in the kernel if it can.

    Raises:
        CheckpointError: the source ends early.
    """
    copy: Callable[..., int] = os.copy_file_range
    while num_bytes:
        try:
            count = copy(source.fileno(), target.fileno(), num_bytes, begin, place)
        except OSError as error:
            if copy is _copy_through_memory or error.errno not in _NOT_BY_KERNEL:
                raise
            copy = _copy_through_memory
            continue
        if not count:
            raise _too_short(source)
        begin, place, num_bytes = begin + count, place + count, num_bytes - count


def _copy_through_memory(source: int, target: int, num_bytes: int, begin: int, place: int) -> int:
    return os.pwrite(target, os.pread(source, min(num_bytes, _WRITE_BYTES), begin), place)


def _too_short(file: BinaryIO) -> CheckpointError:
    return CheckpointError(f"{file.name} is shorter than its header says; fetch it again")

"""Bytes from file to file: by the kernel, and where it cannot."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from vapo_megatron.errors import CheckpointError
from vapo_megatron.weights.copying import copy_exactly, read_exactly, write_exactly

SIZE = 300_001  # several writes, the last one short


def contents(size: int = SIZE) -> bytes:
    generator = torch.Generator().manual_seed(0)
    return bytes(torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).tolist())


def refusing(number, after):
    """A kernel that copies `after` times and then cannot."""
    kernel, calls = os.copy_file_range, []

    def copy(source, target, count, begin, place):
        calls.append(count)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        return kernel(source, target, min(count, 1000), begin, place)

    return copy, calls


@pytest.mark.parametrize("after", [None, 0, 1])
def test_a_copy_is_exact(tmp_path, monkeypatch, after):
    data, calls = contents(), []
    if after is not None:
        copy, calls = refusing(errno.EXDEV, after)
        monkeypatch.setattr(os, "copy_file_range", copy)
    (tmp_path / "from").write_bytes(b"before" + data + b"after")
    with open(tmp_path / "from", "rb") as source, open(tmp_path / "to", "wb") as target:
        copy_exactly(source, 6, target, 10, len(data))
    assert (tmp_path / "to").read_bytes() == bytes(10) + data
    assert len(calls) == (0 if after is None else after + 1)


def test_another_error_is_not_taken_for_a_kernel_that_cannot(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "copy_file_range", refusing(errno.ENOSPC, 0)[0])
    (tmp_path / "from").write_bytes(contents())
    with (
        open(tmp_path / "from", "rb") as source,
        open(tmp_path / "to", "wb") as target,
        pytest.raises(OSError, match="No space left"),
    ):
        copy_exactly(source, 0, target, 0, SIZE)


@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_file_that_ends_early_is_named(tmp_path, monkeypatch, by_kernel):
    if not by_kernel:
        monkeypatch.setattr(os, "copy_file_range", refusing(errno.ENOSYS, 0)[0])
    (tmp_path / "from").write_bytes(contents())
    with open(tmp_path / "from", "rb") as source, open(tmp_path / "to", "wb") as target:
        with pytest.raises(CheckpointError, match="from is shorter than its header says"):
            copy_exactly(source, 1, target, 0, SIZE)
        with pytest.raises(CheckpointError, match="from is shorter than its header says"):
            read_exactly(source, 1, torch.empty(SIZE, dtype=torch.uint8))


def test_tensors_are_written_and_read_where_they_should_be(tmp_path):
    data = torch.frombuffer(bytearray(contents(SIZE - 1)), dtype=torch.bfloat16)
    with open(tmp_path / "file", "w+b") as file:
        write_exactly(file, 7, data)
        again = torch.empty_like(data)
        read_exactly(file, 7, again)
    assert (tmp_path / "file").read_bytes() == bytes(7) + contents(SIZE - 1)
    assert torch.equal(again.view(torch.int16), data.view(torch.int16))

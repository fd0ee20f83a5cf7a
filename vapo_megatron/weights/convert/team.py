"""Shared by both conversions: processes that divide the work, an atomic directory, progress.

A conversion runs in one process, or in several that torchrun started, which need to share only a
file system: each reads and writes its own part. The directory is built under a hidden name beside
its own and renamed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from vapo_megatron.data.storage import replace_directory
from vapo_megatron.errors import CheckpointError
from vapo_megatron.parallel.reduce import gather_objects
from vapo_megatron.weights.hf_directory import partial_of, prepare

Result = TypeVar("Result")
OnProgress = Callable[[int, int], None]
"""Called with (written, total) bytes of this process."""


class Team:
    """The processes of a conversion: `rank` of `size`."""

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        """Join the other processes if torchrun started this one."""
        self.on_progress: OnProgress = on_progress or (lambda done, total: None)
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")

    def together(self, action: Callable[[], Result], *, alone: bool = False) -> Result | None:
        """Run an action on all processes; if it fails on one, raise on all.

        Args:
            action: to run.
            alone: only the first process runs it, the others wait.

        Raises:
            CheckpointError: the first problem.
        """
        result = problem = None
        try:
            if not alone or self.rank == 0:
                result = action()
        except (OSError, ValueError) as error:
            problem = str(error) or repr(error)
        for found in gather_objects(problem):
            if found:
                raise CheckpointError(found)
        return result

    def divide(self, sizes: Sequence[int]) -> list[int]:
        """Return this process's indices; each index goes to the process with the least so far."""
        loads, mine = [0] * self.size, []
        for index, size in enumerate(sizes):
            least = loads.index(min(loads))
            loads[least] += size
            if least == self.rank:
                mine.append(index)
        return mine


@contextlib.contextmanager
def atomic_directory(out_dir: Path, source: Path, team: Team, *, overwrite: bool) -> Iterator[Path]:
    """Yield a hidden directory to fill; rename it to out_dir when all processes are done.

    It is removed on an error; what a killed process leaves is removed by the next conversion.
    """
    team.together(lambda: prepare(out_dir, source, overwrite=overwrite), alone=True)
    partial = partial_of(out_dir)

    try:
        yield partial
        team.together(lambda: replace_directory(partial, out_dir), alone=True)
    except BaseException:
        if team.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


class ByteCount:
    """Counts the bytes that this process writes."""

    def __init__(self, total: int, team: Team) -> None:
        """Start at 0 of `total`."""
        self.done, self.total, self._show = 0, total, team.on_progress

    def add(self, num_bytes: int) -> None:
        """Count written bytes."""
        self.done += num_bytes
        self._show(self.done, self.total)

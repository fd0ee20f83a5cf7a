"""What both conversions share: processes that divide the work, and a directory that is whole.

A conversion runs in one process, or in several that torchrun started, which share a file system
and nothing else: each reads and writes its own part. The directory is made under a hidden name
beside its own and renamed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from vapo_megatron.data.storage import replace_directory
from vapo_megatron.errors import CheckpointError
from vapo_megatron.parallel.reduce import gather_objects
from vapo_megatron.weights.hf_directory import partial_of, prepare

Result = TypeVar("Result")


class Team:
    """The processes of a conversion: `rank` of `size`."""

    def __init__(self) -> None:
        """Join those that torchrun started, if it did."""
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")

    def together(self, action: Callable[[], Result], *, alone: bool = False) -> Result | None:
        """Do something and raise everywhere when it fails anywhere.

        Args:
            action: what.
            alone: the first process does it, the others wait.

        Raises:
            CheckpointError: what went wrong first.
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
        """Return the indices that are this process's: the next goes to whoever has least."""
        loads, mine = [0] * self.size, []
        for index, size in enumerate(sizes):
            least = loads.index(min(loads))
            loads[least] += size
            if least == self.rank:
                mine.append(index)
        return mine


@contextlib.contextmanager
def making(out_dir: Path, source: Path, team: Team, *, overwrite: bool) -> Iterator[Path]:
    """Yield a hidden directory to fill, and give it its name when all processes have filled it.

    Whatever ends the work early removes it; what a kill has left goes when the next one starts.
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


class ByteProgress:
    """A line that says how far a conversion is, rewritten on a terminal, else every few seconds."""

    def __init__(self, total_bytes: int, *, shown: bool = True, every_seconds: float = 5.0) -> None:
        """`shown`: this process's line is the one that is printed."""
        self.total = total_bytes
        self.done = 0
        self._terminal = sys.stderr.isatty()
        self._every = 0.2 if self._terminal else every_seconds
        self._shown = shown
        self._started = self._last = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count bytes that are written."""
        self.done += num_bytes
        now = time.monotonic()
        if self._shown and (now - self._last >= self._every or self.done == self.total):
            self._last = now
            end = "\n" if self.done == self.total or not self._terminal else "\r"
            print(self.line(now - self._started), end=end, file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """Return the line after so many seconds."""
        share = self.done / max(1, self.total)
        rate = self.done / max(seconds, 1e-9)
        left = (self.total - self.done) / max(rate, 1e-9)
        bar = "#" * int(24 * share) + "." * (24 - int(24 * share))
        return (
            f"[{bar}] {share:4.0%}  {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB  "
            f"{rate / 1e6:,.0f} MB/s  {int(left) // 60}:{int(left) % 60:02d} left "
        )

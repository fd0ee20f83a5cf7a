"""The processes that share a conversion, and their progress; used in both directions."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch.distributed as dist

OnProgress = Callable[[int, int], None]
"""Called with (written, total) bytes of this process."""


class Team:
    """The processes of a conversion: `rank` of `size`."""

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        """Join the other processes if torchrun started this one."""
        self._on_progress: OnProgress = on_progress or (lambda done, total: None)
        self.done = self.total = 0
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")

    def divide(self, sizes: Sequence[int]) -> list[int]:
        """Return this process's indices; each index goes to the process with the least so far."""
        loads, mine = [0] * self.size, []
        for index, size in enumerate(sizes):
            least = loads.index(min(loads))
            loads[least] += size
            if least == self.rank:
                mine.append(index)
        return mine

    def add(self, num_bytes: int) -> None:
        """Count written bytes of `total`."""
        self.done += num_bytes
        self._on_progress(self.done, self.total)

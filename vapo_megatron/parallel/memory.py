"""Peak memory of this process (of its GPU, or resident on a CPU), and the host's free memory.

A GPU is shared with vLLM, whose memory pool torch counts even while it is unmapped, and with
libraries that allocate outside torch. So the memory in use is read from the device, plus what torch
has freed since its peak:

    peak = total - free + (torch's peak of reserved bytes - torch's reserved bytes)

Other processes on the same GPU would be counted, too.
"""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import torch


class PeakMemory:
    """Peak memory since `restart`, and since the process started."""

    def __init__(self) -> None:
        self._highest = 0

    def restart(self) -> None:
        """Reset the peak. On a CPU this needs kernel support; without, it is the process's."""
        self._highest = self.highest_bytes()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Return the peak since `restart`."""
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            freed = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
            return total - free + freed
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def highest_bytes(self) -> int:
        """Return the highest peak that any call has seen."""
        return max(self._highest, self.peak_bytes())


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return available host memory: the lower of the kernel's and the control group's figure.

    Page cache that can be reclaimed counts as available. `root` holds proc and sys.
    """
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    found = [int(fields["MemAvailable"].split()[0]) * 1024]
    groups = root / "sys/fs/cgroup"
    for limit, usage, statistics in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        with contextlib.suppress(OSError):
            text = (groups / limit).read_text().strip()
            if text != "max":
                lines = (groups / statistics).read_text().splitlines()
                cache = int(dict(line.split() for line in lines).get("inactive_file", 0))
                found.append(int(text) - int((groups / usage).read_text()) + cache)
    return max(0, min(found))

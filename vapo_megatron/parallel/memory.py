"""What this process holds: of its GPU, or resident where there is none; and the host's free memory.

A GPU is shared with vLLM, whose pool torch counts whether it is mapped or not, and with libraries
that torch knows nothing of. So what is in use is read from the device, and what torch gave back
since its peak is added:

    peak = total - free + (torch's peak of reserved bytes - torch's reserved bytes)

Other processes on the same GPU would be counted too.
"""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import torch


class PeakMemory:
    """Most memory since `restart`, and since the process began."""

    def __init__(self) -> None:
        self._highest = 0

    def restart(self) -> None:
        """Begin a phase. On a CPU whose kernel cannot, the peak is that of the whole process."""
        self._highest = self.highest_bytes()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Return the most since `restart`."""
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            given_back = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
            return total - free + given_back
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def highest_bytes(self) -> int:
        """Return the most since the process began, as far as it was asked for."""
        return max(self._highest, self.peak_bytes())


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return what this machine can still give: the least that the kernel and a control group allow.

    Pages that only cache files can be given too.

    Args:
        root: where proc and sys are found.
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

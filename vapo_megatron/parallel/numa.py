"""Keeps a process on the CPUs next to its GPU.

Pinned memory is allocated on the node of the CPU that first writes it. From another socket a copy
crosses the link between the sockets, which halves PCIe's bandwidth for offload and checkpoints.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

SYSFS = Path("/sys")


def bind_to_gpu(index: int) -> None:
    """Run this thread, and all that it starts, on the CPUs of the GPU's NUMA node.

    Only CPUs that the process already has count: what a launcher or Slurm has bound stays. Where
    the node is unknown, or has none of them, nothing changes.
    """
    p = torch.cuda.get_device_properties(index)
    # Not in torch's stubs.
    ids = [getattr(p, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in ids:
        return
    domain, bus, device = ids
    cpus = near_cpus(SYSFS, f"{domain:04x}:{bus:02x}:{device:02x}.0") & os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)


def near_cpus(sysfs: Path, pci_address: str) -> set[int]:
    """Return the CPUs of a PCI device's NUMA node; empty where the machine does not say.

    Args:
        sysfs: root of sysfs.
        pci_address: DOMAIN:BUS:DEVICE.FUNCTION in hexadecimal, such as 0000:1b:00.0.
    """
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text())
        # -1: one node, or the firmware does not say.
        text = (sysfs / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
    except (OSError, ValueError):
        return set()
    return parse_cpulist(text)


def parse_cpulist(text: str) -> set[int]:
    """Return the CPUs of a list such as 0-3,8,10-11."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found

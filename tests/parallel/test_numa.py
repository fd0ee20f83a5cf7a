"""Which CPUs are next to a GPU, by a made-up sysfs, and whom a process leaves its CPUs to.

Not exercised: where pinned memory then lies.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from vapo_megatron.parallel import backend, numa

GPU = "0000:1b:00.0"


@pytest.fixture
def sysfs(tmp_path):
    """Two nodes; the GPU is on the second."""
    device = tmp_path / "bus/pci/devices" / GPU
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-13,15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    return tmp_path


def test_the_cpus_of_a_gpus_node(sysfs):
    assert numa.near_cpus(sysfs, GPU) == {4, 5, 6, 7, 12, 13, 15}


def test_where_the_machine_does_not_say_there_are_none(sysfs):
    assert numa.near_cpus(sysfs, "0000:2b:00.0") == set()
    node = sysfs / "bus/pci/devices" / GPU / "numa_node"
    for text in ("-1\n", "7\n", "\n"):
        node.write_text(text)
        assert numa.near_cpus(sysfs, GPU) == set()


def test_lists_of_cpus():
    assert numa.parse_cpulist("0-2,5\n") == {0, 1, 2, 5}
    assert numa.parse_cpulist("\n") == set()


@pytest.fixture
def bound(monkeypatch, sysfs):
    """Binds a process that has some CPUs; returns those that it keeps, or None."""
    asked = []
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(numa, "SYSFS", sysfs)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: asked.append((pid, cpus)))

    def bind(mine):
        asked.clear()
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(mine))
        numa.bind_to_gpu(0)
        return asked[0] if asked else None

    bind.properties = properties
    return bind


def test_a_process_runs_next_to_its_gpu(bound):
    assert bound(range(16)) == (0, {4, 5, 6, 7, 12, 13, 15})
    assert bound([0, 1, 4, 5]) == (0, {4, 5}), "what a launcher has bound stays"


def test_a_process_that_is_bound_elsewhere_or_does_not_know_stays(bound):
    assert bound([0, 1]) is None
    del bound.properties.pci_bus_id
    assert bound(range(16)) is None


def test_a_rank_is_bound_before_it_joins_the_others(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(numa, "bind_to_gpu", asked.append)
    monkeypatch.setattr(backend.store, "join", lambda seconds: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backend.initialize_distributed(1)
    assert asked == [3]

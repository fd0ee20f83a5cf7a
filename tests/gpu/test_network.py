"""NCCL's bandwidth between nodes, under torchrun, and what a communicator takes.

Not exercised: NCCL, and more than one node: what a rate means is judged with made-up ones.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.workers import free_port
from tools.smoke import network
from tools.smoke.report import markdown

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_torchruns_processes_make_one_table(tmp_path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2",
        f"--master-port={free_port()}", str(ROOT / "tools/gpu_smoke.py"),
        "--device", "cpu", "--small", "--out", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Verdict: 2 ok, 0 FAILED") == 1
    rows = json.loads((tmp_path / "gpu_smoke.json").read_text())["rows"]
    assert [row["case"] for row in rows] == [
        "all-reduce over 1 x 2 processes", "a communicator of 2 ranks",
    ]  # fmt: skip
    assert rows[0]["figures"]["bus_bytes_per_second"] > 0


@pytest.mark.parametrize(
    ("rate", "nodes", "backend", "passed", "limit"),
    [
        (3.5e11, 2, "nccl", True, ">= 10 GB/s for each GPU"),
        (8.1e10, 2, "nccl", True, ">= 10 GB/s for each GPU"),
        (1.1e10, 2, "nccl", False, ">= 10 GB/s for each GPU"),
        (1.1e10, 1, "nccl", True, ""),
        (1.1e10, 2, "gloo", True, ""),
    ],
)
def test_a_rate_that_only_sockets_have_fails(monkeypatch, rate, nodes, backend, passed, limit):
    """Eight GPUs of a node share what leaves it."""
    monkeypatch.setattr(network.backend, "distributed_backend", lambda: backend)
    row = network.between_nodes(rate, nodes, 8)
    assert (row.passed, row.limit) == (passed, limit)
    assert row.figures["gpu_bytes_per_second"] == rate / 8
    assert row.measured.endswith(": NCCL is on sockets") == (not passed)
    if not passed:
        text = markdown({}, [row])
        assert "libibverbs1" in text and "--device=/dev/infiniband" in text


def measured_twice(taken):
    """Rank 0's communicator takes some bytes, rank 1's twice as much."""
    calls = iter((0, (1 + dist.get_rank()) * taken))
    network.used_bytes = lambda: next(calls)
    row = network.communicator("nccl", "2 ranks")
    return row.figures["communicator_bytes"], row.passed, dist.get_world_size()


@pytest.mark.parametrize(("taken", "passed"), [(360_000_000, True), (361_000_000, False)])
def test_a_communicator_is_compared_with_the_plan(workers, taken, passed):
    """688 MiB = 721,420,288 bytes; the largest of all ranks counts."""
    assert workers.run(2, measured_twice, taken) == [(2.0 * taken, passed, 2)] * 2

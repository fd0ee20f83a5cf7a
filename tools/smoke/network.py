"""Section of tools/gpu_smoke.py under torchrun: what NCCL reaches between nodes.

    torchrun --nnodes 2 --nproc-per-node 8 --node-rank R --master-addr ADDRESS tools/gpu_smoke.py

NCCL goes on over TCP, without an error, where it cannot load the InfiniBand libraries or open the
adapters: every layout then works, many times slower. Rank 0 has the rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.smoke.report import Row
from tools.smoke.sampler import used_bytes
from tools.smoke.sizes import Sizes
from tools.smoke.training import timed
from vapo_megatron.parallel import backend
from vapo_megatron.planning.memory import NCCL_COMMUNICATOR_BYTES

SOCKETS_BYTES_PER_SECOND = 10e9
"""Between nodes, for each GPU: less than one adapter of 100 Gb/s gives, more than TCP does where a
node's eight GPUs share one or two Ethernet adapters."""


def network(sizes: Sizes, directory: Path) -> Iterator[Row]:
    """Time an all-reduce over all processes of all nodes, and measure a communicator."""
    if not dist.is_initialized():
        backend.initialize_distributed(timeout_seconds=300)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    rate, _ = all_reduce_rate(sizes.all_reduce_elements)
    for row in (
        between_nodes(rate, dist.get_world_size() // local_size, local_size),
        communicator("network", f"{dist.get_world_size()} ranks"),
    ):
        if dist.get_rank() == 0:
            yield row


def all_reduce_rate(num_elements: int) -> tuple[float, bool]:
    """Return the bus bandwidth of an all-reduce in bytes/s, and whether two have the same bits.

    2 (n - 1) / n bytes of each byte go over every link of a ring of n ranks, as nccl-tests counts.
    """
    size = dist.get_world_size()
    draw = torch.Generator().manual_seed(dist.get_rank())
    numbers = torch.randn(num_elements, generator=draw).bfloat16().to(backend.device())
    sums = [numbers.clone() for _ in range(2)]
    seconds = min(timed(lambda s=s: dist.all_reduce(s))[0] for s in sums)  # type: ignore[misc]
    is_same = all(gathered(torch.equal(*sums)))
    return 2 * (size - 1) / size * numbers.nbytes / seconds, is_same


def between_nodes(rate: float, num_nodes: int, local_size: int) -> Row:
    """Judge a bus bandwidth: on several nodes with GPUs, each GPU's share of what leaves a node."""
    share, case = rate / local_size, f"all-reduce over {num_nodes} x {local_size} processes"
    judges = num_nodes > 1 and backend.distributed_backend() == "nccl"
    passed = not judges or share >= SOCKETS_BYTES_PER_SECOND
    measured = f"{rate / 1e9:.3g} GB/s of bus bandwidth, {share / 1e9:.3g} for each GPU"
    if not passed:
        measured += ": NCCL is on sockets"
    limit = f">= {SOCKETS_BYTES_PER_SECOND / 1e9:g} GB/s for each GPU" if judges else ""
    figures = {"bus_bytes_per_second": rate, "gpu_bytes_per_second": share}
    return Row("network", case, measured, limit, passed, figures)


def communicator(section: str, case: str, ranks: list[int] | None = None) -> Row:
    """Measure what one more communicator takes of the GPU, against what the plan counts.

    Args:
        section, case: of the row.
        ranks: its members; None: all. Every process calls this with the same.
    """
    before = used_bytes()
    group: Any = dist.new_group(ranks)
    if ranks is None or dist.get_rank() in ranks:
        dist.all_reduce(torch.ones(1, device=backend.device()), group=group)
        backend.synchronize()
    taken = max(gathered(used_bytes() - before))
    if ranks is None or dist.get_rank() in ranks:
        dist.destroy_process_group(group)
    on_gpu = torch.cuda.is_available()
    limit = f"<= {NCCL_COMMUNICATOR_BYTES / 1e9:.2f} GB (vapo plan)" if on_gpu else ""
    return Row(
        section, f"a communicator of {case}", f"{taken / 1e9:.3g} GB of the GPU", limit,
        taken <= NCCL_COMMUNICATOR_BYTES, {"communicator_bytes": float(taken)},
    )  # fmt: skip


def gathered(mine: Any) -> list[Any]:
    """Return every rank's object."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone

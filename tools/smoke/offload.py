"""Section of tools/gpu_smoke.py: a model to host memory and back, bit by bit, and how fast.

GB/s counts parameters, main parameters and Adam's moments once, 1e9 bytes to a GB, over the seconds
of a whole turn: copies, and the device memory that is given back or taken.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch import Tensor

from tools.smoke.models import build_role, make_config, whole_mini_batch
from tools.smoke.report import Row
from tools.smoke.sizes import Sizes
from tools.smoke.training import described_shape, forward, planned, timed, trained_shape
from vapo_megatron.parallel.offload import find_storages
from vapo_megatron.roles.placed import PlacedModel


def offload(sizes: Sizes, directory: Path, name: str) -> list[Row]:
    """Offload an actor that has learnt, so that its moments are not zero, and fetch it back."""
    shape, title = trained_shape(sizes, name)
    config = make_config("bfloat16", tokens_per_microbatch=sizes.load.tokens_per_microbatch)
    model = build_role("actor", shape, config)
    batch, plan = planned(sizes, shape)
    _, batch = forward(model, batch, plan)
    model.update([whole_mini_batch(batch, plan)])
    placed = model.placed
    before = _bits(placed)
    num_bytes = sum(copy.numel() for copy in before)
    held_before = _device_bytes()
    seconds_first, _ = timed(placed.offload)
    left_bytes = _device_bytes()
    with contextlib.ExitStack() as stack:
        seconds_in, _ = timed(lambda: stack.enter_context(placed.held("state")))
        found = _bits(placed)
        same = len(found) == len(before) and all(map(torch.equal, found, before))
        seconds_out, _ = timed(stack.close)
    figures = {
        "bytes": float(num_bytes), "first_seconds": seconds_first,
        "in_seconds": seconds_in, "out_seconds": seconds_out,
        "device_bytes_before": float(held_before), "device_bytes_left": float(left_bytes),
    }  # fmt: skip
    placed.close()
    measured = (
        f"{num_bytes / 1e9:.3g} GB, {num_bytes / 1e9 / seconds_out:.3g} GB/s to the host, "
        f"{num_bytes / 1e9 / seconds_in:.3g} GB/s back; {seconds_first:.2g} s with taking the host "
        f"memory; tensors on the GPU {held_before / 1e9:.3g} GB, then {left_bytes / 1e9:.3g} GB"
    )
    case = described_shape(title, shape, "actor")
    return [Row("offload", case, measured, "same bits", same, figures)]


def _bits(placed: PlacedModel) -> list[Tensor]:
    """Copy to the host the bytes that a round trip must keep."""
    storages = find_storages([p for c in placed.chunks for p in c.parameters()], placed.optimizer)
    return [
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu().clone()
        for storage in (*storages.parameters, *storages.state)
    ]


def _device_bytes() -> int:
    """Bytes of tensors on the GPU; 0 on a CPU, where the host is the device."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0

"""A tiny model, a cluster of round figures and a step, whose seconds tests count by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.planning.shapes import changed, small_shape
from vapo_megatron.config import VapoConfig
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.workload import Workload

SHAPE = small_shape(hidden=4, layers=4, heads=2, kv_heads=2, head=2, ffn=5, vocab=7)
# Round figures: 1 TFLOP/s of products and attention, 1 GB/s of memory, 1 GB/s each way on NVLink
# and on the network, no latency.
_SHARES = ("matmul", "attention", "memory", "decode", "nvlink", "network", "pcie")
ROUND = Cluster(
    num_gpus=8, peak_tflops=1.0, memory_gb_per_second=1.0, nvlink_gb_per_second=2.0,
    network_gb_per_second=1.0, pcie_gb_per_second=1.0, collective_seconds=0.0,
    decode_step_seconds=0.0, layer_host_seconds=0.0, **{f"{name}_share": 1.0 for name in _SHARES},
)  # fmt: skip
FAST_MEMORY = dataclasses.replace(ROUND, memory_gb_per_second=1e12)
WORKLOAD = Workload(
    num_responses=8,
    group_size=2,
    mini_batch_size=4,
    prompt_tokens=2,
    mean_response_tokens=6,
    max_response_tokens=6,
)
"""Responses of 6 tokens, sequences of 8: 36 pairs each."""

# Layer, by hand: q, k, v and output 4 x 4 each, gate, up, down 4 x 5 each: 64 + 60 = 124 weights,
# 248 FLOPs a token and 2 * 4 * 2 = 16 a pair. Output: 7 x 4 weights, 56 FLOPs a position.
TOKEN, PAIR, OUTPUT = 248e-12, 16e-12, 56e-12


def config(world_size: int = 8, **parallel: Any) -> VapoConfig:
    """Microbatches of 8 tokens, everything on the GPU."""
    given = {"world_size": world_size, "max_tokens_per_microbatch": 8, "offload": False, **parallel}
    return changed(VapoConfig(), parallel=given)

"""Predicts bytes per link class and time of a resharding plan and of a full gather.

From bandwidths alone: no latency, no contention between nodes, no overlap of buckets.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning.cluster import GB, Cluster
from vapo_megatron.weights.holders import TrainerLayout
from vapo_megatron.weights.reshard.plan import Plan
from vapo_megatron.weights.reshard.shards import trainer_pieces
from vapo_megatron.weights.reshard.steps import BUCKET_BYTES, buckets
from vapo_megatron.weights.table import rows_in_order

LINK_CLASSES = ("same GPU", "same node", "across nodes")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes by link class (LINK_CLASSES) and rank, and the predicted time."""

    sent: np.ndarray
    """[3, ranks]."""
    received: np.ndarray
    """[3, ranks]."""
    seconds: float


def plan_cost(plan: Plan, cluster: Cluster, bucket_bytes: int = BUCKET_BYTES) -> Cost:
    """Predict a plan's execution, bucket after bucket.

    A bucket takes as long as its slowest rank: its links, then packing, unpacking and copying.
    """
    assert plan.gpus_per_node == cluster.gpus_per_node, "the plan is for other nodes"
    sent, received = (np.zeros((3, plan.world_size)) for _ in range(2))
    seconds = 0.0
    for bucket in buckets(plan, bucket_bytes):
        out, into, copied = bucket.counts
        on_links = _link_seconds(cluster, out, into)
        in_memory = _memory_seconds(cluster, copied + out.sum(0) + into.sum(0))
        seconds += float((on_links + in_memory).max())
        sent += np.vstack([copied, out])
        received += np.vstack([copied, into])
    return Cost(sent, received, seconds)


def full_gather_cost(
    shape: ModelShape,
    trainer: TrainerLayout,
    rollout_tp_size: int,
    cluster: Cluster,
    *,
    bytes_per_element: int = 2,
) -> Cost:
    """Predict gather.gather_hf_tensors: every rank receives every tensor in full.

    Stage after stage, shards are broadcast along the pipeline, ring-gathered in each
    tensor-parallel group, and joined into full tensors, from which vLLM's loader copies its shard.
    """
    world, tp_size = trainer.world_size, trainer.tp_size
    ranks = np.arange(world)
    stride = tp_size * trainer.dp_size
    stage_of = ranks // stride
    around_tp = ranks - ranks % tp_size + (ranks + 1) % tp_size
    around_pp = (ranks + stride) % world
    sent, received = (np.zeros((3, world)) for _ in range(2))
    seconds = 0.0
    for stage, num_bytes in enumerate(_stage_bytes(shape, trainer, bytes_per_element)):
        held = np.where(stage_of == stage, num_bytes, 0)
        sent[0] += held
        received[0] += held
        # The rank before the sender in the ring passes nothing on.
        passes_on = (stage_of + 1) % trainer.pp_size != stage
        for next_rank, amounts in (
            (around_pp, np.where(passes_on, num_bytes, 0)),
            (around_tp, np.full(world, (tp_size - 1) * num_bytes)),
        ):
            across = ranks // cluster.gpus_per_node != next_rank // cluster.gpus_per_node
            out, into = np.zeros((2, world)), np.zeros((2, world))
            np.add.at(out, (across.astype(int), ranks), amounts)
            np.add.at(into, (across.astype(int), next_rank), amounts)
            sent[1:] += out
            received[1:] += into
            seconds += float(_link_seconds(cluster, out, into).max())
        through_memory = tp_size * num_bytes * (1 + 1 / rollout_tp_size)
        seconds += float(_memory_seconds(cluster, np.array(through_memory)))
    return Cost(sent, received, seconds)


def _link_seconds(cluster: Cluster, sent: np.ndarray, received: np.ndarray) -> np.ndarray:
    """Return how long each rank's links are busy; both directions and both classes overlap.

    sent, received: bytes [2, ranks], within the node and across nodes.
    """
    speeds = np.array([cluster.rate("nvlink"), cluster.rate("network")])
    return (np.maximum(sent, received) / speeds[:, None]).max(0)


def _memory_seconds(cluster: Cluster, num_bytes: np.ndarray) -> np.ndarray:
    """Return how long each rank takes to read and write bytes once."""
    return 2 * num_bytes / cluster.rate("memory")


def _stage_bytes(shape: ModelShape, trainer: TrainerLayout, bytes_per_element: int) -> list[int]:
    """Sum each stage's shard of one tensor-parallel rank, with the vocabulary's padding."""
    found = [0] * trainer.pp_size
    for row, layer in rows_in_order(shape, "actor"):
        if not trainer.on_first_rank(row):
            continue
        # Shards are equal, and the first has no padding unless it is padding alone.
        pieces = trainer_pieces(row, shape, trainer, tp_rank=0)
        elements = sum(piece.rows * piece.columns for piece in pieces)
        found[trainer.home(row, layer)[0]] += elements * bytes_per_element
    return found


def describe(costs: dict[str, Cost], *, per_rank: bool = False) -> str:
    """Return a table: GB of each rank by link class, and predicted seconds.

    Args:
        costs: by title.
        per_rank: also list every rank.
    """

    def line(title: str, what: str, values: np.ndarray, end: str = "") -> str:
        cells = "".join(f"{value / GB:14.3f}" for value in values)
        return f"{title:<16}{what:<20}{cells}{end}"

    names = "".join(f"{name:>14}" for name in LINK_CLASSES)
    lines = [f"{'GB (1e9 bytes)':<16}{'':<20}{names}{'seconds':>11}"]
    for title, cost in costs.items():
        lines.append(line(title, "received, mean", cost.received.mean(1), f"{cost.seconds:11.3f}"))
        lines.append(line("", "received, largest", cost.received.max(1)))
        lines.append(line("", "sent, largest", cost.sent.max(1)))
    for title, cost in costs.items() if per_rank else ():
        for rank, (sent, received) in enumerate(zip(cost.sent.T, cost.received.T, strict=True)):
            lines.append(line(title, f"rank {rank}: sent", sent))
            lines.append(line("", "received", received))
    return "\n".join(lines)

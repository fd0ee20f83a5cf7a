"""The plan that turns the trainer's shards into the sampler's: who sends which rectangle to whom.

Every process is a rank of the trainer and of the sampler. A rank receives exactly the part of its
vLLM shard that is not in its own Megatron shard, once: from a rank of its own node where one holds
it, otherwise across nodes. With relays, no node receives an element twice. Ranks that hold the same
elements and are equally near share what they send: each link class (same node, across nodes) is
balanced by itself, because they are different wires. That gives the largest sender the fewest bytes
possible on each, up to a matrix row.

A plan is data, the same on every rank, computed from descriptions alone: no process group, no GPU,
no random number. Layers that one pipeline stage holds are planned once and repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vapo_megatron.weights.mapping import EMBEDDING, Row, rows
from vapo_megatron.weights.reshard.plan import Layer, Plan
from vapo_megatron.weights.reshard.planner import BlockPlanner, Home
from vapo_megatron.weights.reshard.shards import TrainerLayout, check_sampler

if TYPE_CHECKING:
    from vapo_megatron.models.hf_config import ModelShape


def make_plan(
    shape: ModelShape,
    trainer: TrainerLayout,
    sampler_tp_size: int,
    *,
    gpus_per_node: int,
    bytes_per_element: int = 2,
    relay: bool = True,
) -> Plan:
    """Plan the way of the actor's weights from the trainer's shards into the sampler's.

    Args:
        shape: of the model.
        trainer: see shards.trainer_layout; the sampler runs on the same ranks.
        sampler_tp_size: ranks of one vLLM replica, which are consecutive.
        gpus_per_node: consecutive ranks that share a node.
        bytes_per_element: of the weights, for counts of bytes; moves count elements.
        relay: what several ranks of a node lack and the node does not hold comes to the node once,
            in parts, and they hand their parts to each other; without, it comes to each of them.

    Raises:
        ConfigError: vLLM could not lay out the model so.
    """
    check_sampler(shape, sampler_tp_size, trainer.world_size)
    planner = BlockPlanner(shape, trainer, sampler_tp_size, gpus_per_node, relay)
    table = rows(shape, "actor")
    in_layer = [row for row in table if "{}" in row.hf[0]]
    blocks = []
    for stage, chunks in enumerate(trainer.layers):
        layers = tuple(
            Layer(first + i, chunk, i)
            for chunk, (first, stop) in enumerate(chunks)
            for i in range(stop - first)
        )
        blocks.append(planner.block(in_layer, {stage: (0, None)}, layers))
    outside: dict[tuple[tuple[int, Home], ...], list[Row]] = {}
    for row in table:
        if "{}" not in row.hf[0] and not row.is_copy:
            outside.setdefault(tuple(_homes(row, table, trainer).items()), []).append(row)
    # These come last: senders of a tied embedding stand in two stages, and even out their loads.
    for homes, some in outside.items():
        blocks.append(planner.block(some, dict(homes)))
    return Plan(trainer.world_size, gpus_per_node, bytes_per_element, tuple(blocks))


def _homes(row: Row, table: list[Row], trainer: TrainerLayout) -> dict[int, Home]:
    """Find the stages that hold a row outside the layers, and where."""
    homes: dict[int, Home] = {}
    for home in [row, *(other for other in table if other.is_copy and other.hf == row.hf)]:
        stage = trainer.stage_of(home)
        chunk = 0 if home.hf == (EMBEDDING,) and not home.is_copy else trainer.last_chunk
        homes.setdefault(stage, (chunk, home.megatron[0] if home.is_copy else None))
    return homes

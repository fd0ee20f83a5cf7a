"""Resharding plans of mixtures of experts: each element of an engine shard once, from its holder.

What a rank of either side holds is counted here from the layout alone: an expert is whole on a
trainer's rank, and cut over the engine's ranks or whole on one of them. That the slices land where
vLLM reads them is test_sync.py's.
"""

import collections
import dataclasses
import math

import pytest

from vapo_megatron.models.known import known_shape
from vapo_megatron.weights.holders import trainer_layout
from vapo_megatron.weights.reshard.planner import make_plan

SHAPE = dataclasses.replace(
    known_shape("Qwen3-30B-A3B"), num_layers=2, vocab_size=1024, experts=dataclasses.replace(
        known_shape("Qwen3-30B-A3B").experts, count=16, layers=(0, 1)
    ),
)  # fmt: skip
EXPERT = 3 * SHAPE.hidden_size * SHAPE.experts.ffn_hidden_size
CASES = [
    # TP, PP, DP, EP, vLLM's TP
    (1, 1, 8, 8, 4), (2, 1, 4, 8, 4), (2, 2, 2, 4, 8), (1, 2, 4, 2, 2), (2, 1, 4, 1, 2),
    (4, 1, 2, 4, 1),
]  # fmt: skip


def held(layout, rank, layer):
    """Experts of a layer that a rank of the trainer holds."""
    stage, within = divmod(rank, layout.tp_size * layout.dp_size)
    if not layout.layers[stage][0][0] <= layer < layout.layers[stage][0][1]:
        return set()
    share = SHAPE.experts.count // layout.ep_size
    part = within % layout.ep_size
    return set(range(part * share, (part + 1) * share))


@pytest.mark.parametrize("apart", [False, True], ids=["cut", "whole"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_exactly_the_missing_elements_travel(case, apart):
    tp, pp, dp, ep, engine_tp = case
    layout = trainer_layout(SHAPE, tp_size=tp, pp_size=pp, dp_size=dp, ep_size=ep)
    for relay in (False, True):
        plan = make_plan(
            SHAPE, layout, engine_tp, gpus_per_node=4, relay=relay, experts_apart=apart
        )
        received = collections.Counter()
        into = collections.Counter()
        for block in plan.blocks:
            for move in (*block.moves, *block.relays):
                if "routed_experts" in move.destination.parameter:
                    for _ in block.layers:
                        into[move.destination_rank] += move.destination.num_elements
                        if move.source_rank != move.destination_rank:
                            received[move.destination_rank] += move.destination.num_elements
        for rank in range(plan.world_size):
            shard, missing = 0, 0
            for layer in range(SHAPE.num_layers):
                for expert in range(SHAPE.experts.count):
                    place = rank % engine_tp
                    own = expert // (SHAPE.experts.count // engine_tp) == place
                    wanted = (EXPERT if own else 0) if apart else EXPERT // engine_tp
                    shard += wanted
                    missing += 0 if expert in held(layout, rank, layer) else wanted
            assert (into[rank], received[rank]) == (shard, missing), (rank, relay)


def test_no_node_receives_an_expert_twice():
    layout = trainer_layout(SHAPE, tp_size=1, pp_size=2, dp_size=8, ep_size=8)
    plan = make_plan(SHAPE, layout, 2, gpus_per_node=8)
    arrived = collections.Counter()
    for block in plan.blocks:
        for move in block.moves:
            source, node = move.source_rank // 8, move.destination_rank // 8
            if "routed_experts" in move.destination.parameter and source != node:
                arrived[node] += move.source.num_elements * len(block.layers)
    # A stage is a node, and lacks the other's layer.
    assert arrived == {0: 16 * EXPERT, 1: 16 * EXPERT}


def test_a_large_mixture_is_planned_in_seconds_and_covers_the_engine():
    shape = known_shape("Qwen3-235B-A22B")
    layout = trainer_layout(shape, tp_size=4, pp_size=2, dp_size=8, ep_size=32)
    plan = make_plan(shape, layout, 8, gpus_per_node=8)
    found = sum(
        move.destination.num_elements * len(block.layers)
        for block in plan.blocks
        for move in (*block.moves, *block.relays)
        if move.destination_rank == 0 and "routed_experts" in move.destination.parameter
    )
    experts = shape.experts
    whole = 3 * shape.hidden_size * experts.ffn_hidden_size * experts.count * shape.num_layers
    assert found == whole // 8 and math.isclose(whole, 227e9, rel_tol=0.01)

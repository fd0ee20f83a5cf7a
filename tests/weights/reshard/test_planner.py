"""Resharding plans on real names and shapes, executed on integers in place of elements.

For each layout: every vLLM parameter ends up as vLLM's own loader would slice the HF tensor, no
element arrives twice, the bytes on each link class equal a count made without the plan, and no
sender carries more than a lower bound on the best assignment, plus 1 %. With relays, no node
receives an element twice, and its ranks divide evenly what they receive across nodes.

The default run takes a systematic part of the layouts. All of them, world sizes 1 to 64:

    pytest -m slow tests/weights/reshard/test_planner.py

Does not exercise: sending anything (the executor's tests), and Megatron's and vLLM's names against
built models.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from tests.weights.reshard.cases import (
    MODELS,
    Case,
    Symbols,
    all_symbols,
    rollout_tp_sizes,
    trainer_layouts,
)
from vapo_megatron.models.known import known_shape
from vapo_megatron.weights.reshard.plan import ENGINE, Block, Move, Plan, Slice
from vapo_megatron.weights.reshard.planner import make_plan
from vapo_megatron.weights.table import EMBEDDING

SAME_RANK, SAME_NODE, ACROSS = range(3)


def plan_of(case: Case, *, relay: bool) -> Plan:
    return make_plan(
        case.shape, case.trainer, case.rollout_tp, gpus_per_node=case.gpus_per_node, relay=relay,
        rollout_workers=case.rollout_ranks if case.rollout_workers else None,
    )  # fmt: skip


def link_class(plan: Plan, move: Move) -> int:
    if move.source_rank == move.destination_rank:
        return SAME_RANK
    nodes = {r // plan.gpus_per_node for r in (move.source_rank, move.destination_rank)}
    return SAME_NODE if len(nodes) == 1 else ACROSS


def moved(plan: Plan, *, relays: bool) -> np.ndarray:
    """Count the elements of moves or relays: [link class, source or destination, rank]."""
    counts = np.zeros((3, 2, plan.world_size), dtype=np.int64)
    for block in plan.blocks:
        for move in block.relays if relays else block.moves:
            count = move.source.num_elements * max(1, len(block.layers))
            counts[link_class(plan, move), 0, move.source_rank] += count
            counts[link_class(plan, move), 1, move.destination_rank] += count
    return counts


def contents(case: Case) -> Iterator[tuple[Symbols, list[range], int]]:
    """Yield what the model is made of: symbols, ranks of the stages that hold them, how often."""
    layer, outside = all_symbols(case.model, case.tp, case.rollout_tp)
    per_stage, last = case.tp * case.dp, case.pp - 1
    stages = [range(p * per_stage, (p + 1) * per_stage) for p in range(case.pp)]
    for symbols in layer:
        for ranks in stages:
            yield symbols, [ranks], case.shape.num_layers // case.pp
    for symbols in outside:
        homes = {last}
        if symbols.row.hf == (EMBEDDING,):
            homes = {0, last} if case.shape.tied else {0}
        yield symbols, [stages[p] for p in sorted(homes)], 1


class Demand(NamedTuple):
    """What a rank or node needs, counted without the plan."""

    ranks: tuple[int, ...]
    """One rank; or all of a node, which need it together (each part by those of one shard)."""
    link: int
    holders: frozenset[int]
    """The nearest ranks that hold it."""
    count: int


def demands(case: Case, *, relay: bool) -> Iterator[Demand]:
    """Yield the needs of each rank; with relays, of each node for what comes across nodes."""
    nodes = [
        range(first, min(first + case.gpus_per_node, case.num_ranks))
        for first in range(0, case.num_ranks, case.gpus_per_node)
    ]
    for symbols, homes, times in contents(case):
        replicated = symbols.row.kind == "replicated"
        for t in [None] if replicated else range(case.tp):
            everyone = frozenset(
                r for ranks in homes for r in ranks[t :: case.tp if t is not None else 1]
            )
            for node in nodes:
                near = everyone & set(node)
                rollout_workers = tuple(rank for rank in node if rank in case.rollout_ranks)
                if relay and not near and rollout_workers:
                    shards = frozenset(map(case.shard, rollout_workers))
                    count = symbols.sampler[0].size if replicated else symbols.union(shards, t)
                    yield Demand(rollout_workers, ACROSS, everyone, times * count)
                    continue
                for rank in rollout_workers:
                    link = SAME_RANK if rank in near else SAME_NODE if near else ACROSS
                    shard = case.shard(rank)
                    count = symbols.sampler[0].size if replicated else symbols.shared[shard, t]
                    yield Demand((rank,), link, near or everyone, times * int(count))


def check_bytes(case: Case, plan: Plan, *, relay: bool) -> None:
    """Compare what each rank receives, by link class, and what the busiest sender sends."""
    direct, relayed = (moved(plan, relays=relays) for relays in (False, True))
    expected = np.zeros((3, case.num_ranks), dtype=np.int64)
    pools: dict[int, collections.Counter[frozenset[int]]] = {
        SAME_NODE: collections.Counter(), ACROSS: collections.Counter()
    }  # fmt: skip
    for demand in demands(case, relay=relay):
        # A node's are entered with its first rank, and compared by node below.
        expected[demand.link, demand.ranks[0]] += demand.count
        if demand.link != SAME_RANK:
            pools[demand.link][demand.holders] += demand.count
    received = direct[:, 1]
    assert (received[:ACROSS] == expected[:ACROSS]).all(), str(case)
    if relay:
        starts = range(0, case.num_ranks, case.gpus_per_node)
        per_node = [np.add.reduceat(x[ACROSS], starts) for x in (received, expected)]
        assert (per_node[0] == per_node[1]).all(), str(case)
    else:
        assert (received[ACROSS] == expected[ACROSS]).all(), str(case)
        assert not relayed.any()
    assert not relayed[[SAME_RANK, ACROSS]].any()
    needed = np.zeros(case.num_ranks, dtype=np.int64)
    for demand in demands(case, relay=False):
        needed[demand.ranks[0]] += demand.count
    assert (received.sum(0) + relayed[SAME_NODE, 1] == needed).all(), str(case)
    for link, pool in pools.items():
        # Only these ranks hold it, so they have to send it in any assignment.
        bound = max(
            (sum(n for p, n in pool.items() if p <= ranks) / len(ranks) for ranks in pool),
            default=0,
        )
        assert direct[link, 0].max() <= 1.01 * bound, f"{case}: link class {link}"


def check_receivers(case: Case, plan: Plan) -> None:
    """Ranks of a node that hold the same sampler shard divide evenly what comes to it."""
    received = moved(plan, relays=False)[ACROSS, 1]
    for first in range(0, case.num_ranks, case.gpus_per_node):
        for shard in range(case.rollout_tp):
            ranks = [
                rank
                for rank in range(first, min(first + case.gpus_per_node, case.num_ranks))
                if rank in case.rollout_ranks and case.shard(rank) == shard
            ]
            if ranks:
                mean = received[ranks].mean()
                assert (abs(received[ranks] - mean) <= 0.01 * mean).all(), f"{case}: {ranks}"


def execute(case: Case, plan: Plan) -> None:
    """Execute every block on integers and compare with vLLM's slices."""
    layer, outside = all_symbols(case.model, case.tp, case.rollout_tp)
    for block in plan.blocks:
        known = {s.parameter: s for s in (layer if block.layers else outside)}
        names = {m.destination.parameter for m in block.moves}
        assert names == set(known) if block.layers else names <= set(known)
        result = {
            (rank, name): np.full_like(known[name].sampler[case.shard(rank)], -1)
            for rank in case.rollout_ranks
            for name in names
        }
        for move in (*block.moves, *block.relays):
            symbols = known[move.destination.parameter]
            if move.source.chunk == ENGINE:
                source = result[move.source_rank, move.source.parameter]
            else:
                check_source(case, move, symbols)
                source = symbols.trainer[move.source_rank % case.tp]
            taken = view(source, move.source, symbols)
            target = view(
                result[move.destination_rank, symbols.parameter], move.destination, symbols
            )
            assert (taken >= 0).all() and (target == -1).all(), f"{case}: {move}"
            target[:] = taken
        for (rank, name), found in result.items():
            expected = known[name].sampler[case.shard(rank)]
            assert (found == expected).all(), f"{case}: {name} of rank {rank}"


def check_source(case: Case, move: Move, symbols: Symbols) -> None:
    """The parameter that is read is the one that holds the HF tensor."""
    is_copy = move.source_rank >= case.tp * case.dp and symbols.row.hf == (EMBEDDING,)
    expected = "output_layer.weight" if is_copy else symbols.row.megatron[0]
    assert move.source.parameter == expected, move
    assert (move.source.chunk == case.vpp - 1) or "{}" in expected or "embedding" in expected, move


def view(array: np.ndarray, part: Slice, symbols: Symbols) -> np.ndarray:
    width = symbols.column_width
    assert part.column % width == 0 and part.columns % width == 0, part
    first, count = part.column // width, part.columns // width
    found = array[part.row : part.row + part.rows, first : first + count]
    assert found.shape == (part.rows, count), part
    return found


def check_layers(case: Case, plan: Plan) -> None:
    """Every layer is planned once, at the place where megatron-core has it."""
    size = case.shape.num_layers // (case.pp * case.vpp)
    found = {}
    for stage, block in enumerate(b for b in plan.blocks if b.layers):
        assert {m.source_rank // (case.tp * case.dp) for m in block.moves} == {stage}
        found |= {layer.number: (stage, layer.chunk, layer.local_number) for layer in block.layers}
    # transformer_layer.get_transformer_layer_offset: chunk v begins at v * (layers / vpp), and
    # stage p in it at p * (layers / vpp / pp).
    expected = {
        v * (case.shape.num_layers // case.vpp) + p * size + i: (p, v, i)
        for p in range(case.pp) for v in range(case.vpp) for i in range(size)
    }  # fmt: skip
    assert found == expected, str(case)


def check(case: Case, *, relay: bool) -> None:
    plan = plan_of(case, relay=relay)
    check_bytes(case, plan, relay=relay)
    execute(case, plan)
    check_layers(case, plan)
    if relay:
        check_receivers(case, plan)


def part_of_the_layouts(model: str) -> list[Case]:
    """Every pair of tensor-parallel sizes with each of a few pipelines, worlds and nodes."""
    found = []
    sizes = [tp for tp in (1, 2, 4, 8) if known_shape(model).num_key_value_heads % tp == 0]
    sizes += [2 * sizes[-1]]  # fewer key-value heads than ranks
    allowed = set(trainer_layouts(model))
    for tp in sizes:
        for rollout_tp in rollout_tp_sizes(model, 64):
            # Stages on several nodes, on one, on part of one, and on ragged parts.
            for pp, vpp, world, node in ((1, 1, 16, 4), (2, 2, 16, 8), (4, 1, 32, 8), (4, 3, 16, 4),
                                         (2, 1, 24, 8)):  # fmt: skip
                dp = world // (tp * pp)
                if (tp, pp, vpp, dp) in allowed and tp * pp * dp % rollout_tp == 0:
                    found.append(Case(model, tp, pp, vpp, dp, rollout_tp, node))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_part_of_the_layouts(model):
    cases = part_of_the_layouts(model)
    assert len(cases) >= 12
    for i, case in enumerate(cases):
        check(case, relay=i % 3 > 0)


# Nodes that cut stages, so that senders of a tied embedding start unequal; 64 ranks; norms of each
# head; no biases; vLLM ranks that share key-value heads.
OTHERS = (
    Case("Qwen2.5-0.5B", tp=1, pp=3, vpp=2, dp=3, rollout_tp=1),
    Case("Qwen2.5-0.5B", tp=1, pp=3, vpp=1, dp=12, rollout_tp=2),
    Case("Qwen2.5-0.5B", tp=2, pp=4, vpp=3, dp=8, rollout_tp=2),
    Case("Qwen2.5-7B", tp=4, pp=2, vpp=1, dp=8, rollout_tp=2),
    Case("Qwen2.5-32B", tp=8, pp=4, vpp=2, dp=2, rollout_tp=4),
    Case("Qwen3-0.6B", tp=4, pp=2, vpp=2, dp=2, rollout_tp=2, gpus_per_node=4),
    Case("Llama-3.2-1B", tp=2, pp=4, vpp=1, dp=2, rollout_tp=8, gpus_per_node=8),
    Case("Qwen2.5-1.5B", tp=4, pp=2, vpp=2, dp=2, rollout_tp=4, gpus_per_node=4),
    Case("Qwen2.5-3B", tp=1, pp=4, vpp=3, dp=2, rollout_tp=8, gpus_per_node=8),
)


@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_other_models(case, relay):
    check(case, relay=relay)


# Separate rollout workers: beside the trainers, on their own nodes, and split by a node boundary;
# as many, fewer and more, and in shards that are no part of the trainers'.
APART = (
    Case("Qwen2.5-0.5B", tp=2, pp=1, vpp=1, dp=1, rollout_tp=1, rollout_workers=2),
    Case("Qwen2.5-7B", tp=4, pp=2, vpp=1, dp=1, rollout_tp=2, rollout_workers=8),
    Case("Qwen2.5-7B", tp=2, pp=2, vpp=2, dp=3, rollout_tp=4, rollout_workers=8, gpus_per_node=5),
    Case("Qwen2.5-32B", tp=8, pp=2, vpp=1, dp=2, rollout_tp=4, rollout_workers=24),
    Case(
        "Llama-3.2-1B", tp=1, pp=4, vpp=1, dp=2, rollout_tp=8, rollout_workers=16, gpus_per_node=8
    ),
)


@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize("case", APART, ids=str)
def test_rollout_workers_of_their_own(case, relay):
    check(case, relay=relay)
    plan = plan_of(case, relay=relay)
    received = moved(plan, relays=False) + moved(plan, relays=True)
    assert not received[:, 1, : case.world_size].any(), "a trainer receives nothing"
    assert not moved(plan, relays=False)[:, 0, case.world_size :].any()
    # Bytes received of the bytes of a shard; every rank of a tensor-parallel size has as many.
    layer, outside = all_symbols(case.model, 1, case.rollout_tp)
    for rank in case.rollout_ranks:
        shard = case.shard(rank)
        size = sum((s.sampler[shard] >= 0).sum() * s.column_width for s in outside)
        size += case.shape.num_layers * sum(
            (s.sampler[shard] >= 0).sum() * s.column_width for s in layer
        )
        assert received[:, 1, rank].sum() == size, rank


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_all_layouts_up_to_64_ranks(model, relay):
    for tp, pp, vpp, dp in trainer_layouts(model):
        for rollout_tp in rollout_tp_sizes(model, tp * pp * dp):
            case = Case(model, tp, pp, vpp, dp, rollout_tp)
            if vpp == 1:
                check(case, relay=relay)
                continue
            plan = plan_of(case, relay=relay)
            check_layers(case, plan)
            plain = plan_of(dataclasses.replace(case, vpp=1), relay=relay)
            assert all(map(same_but_for_chunks, plan.blocks, plain.blocks)), str(case)


def same_but_for_chunks(block: Block, plain: Block) -> bool:
    """Virtual stages change in which chunk a stage holds a parameter, and nothing else."""

    def unplaced(moves: tuple[Move, ...]) -> list[Move]:
        return sorted(m._replace(source=m.source._replace(chunk=0)) for m in moves)

    return (
        unplaced(block.moves) == unplaced(plain.moves)
        and block.relays == plain.relays
        and len(block.layers) == len(plain.layers)
    )

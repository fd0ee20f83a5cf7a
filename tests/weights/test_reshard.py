"""Resharding plans on real names and shapes, executed on integers in the place of elements.

For each layout: every vLLM parameter ends up as vLLM's own loader would slice the HF tensor, no
element arrives twice, the bytes on each link class equal a count made without the plan, and no
sender carries more than a lower bound on the best assignment, plus 1 %.

The default run takes a systematic part of the layouts. All of them, world sizes 1 to 64:

    pytest -m slow tests/weights/test_reshard.py

Does not exercise: sending anything (the executor's tests), and Megatron's and vLLM's names against
built models.
"""

from __future__ import annotations

import collections

import numpy as np
import pytest

from tests.weights.reshard_cases import (
    MODELS,
    Case,
    Symbols,
    all_symbols,
    sampler_sizes,
    trainer_layouts,
)
from vapo_megatron.models.known import known_shape
from vapo_megatron.weights.mapping import EMBEDDING
from vapo_megatron.weights.plan import Move, Plan, Slice
from vapo_megatron.weights.reshard import make_plan

SAME_RANK, SAME_NODE, ACROSS = range(3)


def plan_of(case: Case) -> Plan:
    return make_plan(case.shape, case.trainer, case.sampler_tp, gpus_per_node=case.gpus_per_node)


def link_class(plan: Plan, move: Move) -> int:
    if move.source_rank == move.destination_rank:
        return SAME_RANK
    nodes = {r // plan.gpus_per_node for r in (move.source_rank, move.destination_rank)}
    return SAME_NODE if len(nodes) == 1 else ACROSS


def moved(plan: Plan) -> np.ndarray:
    """Count elements: [link class, source or destination, rank]."""
    counts = np.zeros((3, 2, plan.world_size), dtype=np.int64)
    for block in plan.blocks:
        for move in block.moves:
            count = move.num_elements * max(1, len(block.layers))
            counts[link_class(plan, move), 0, move.source_rank] += count
            counts[link_class(plan, move), 1, move.destination_rank] += count
    return counts


def contents(case: Case) -> list[tuple[list[Symbols], list[int], int]]:
    """Say what the model is made of: (symbols, the stages that hold them, how often)."""
    layer, outside = all_symbols(case.model, case.tp, case.sampler_tp)
    last = case.pp - 1
    found = [(layer, [stage], case.shape.num_layers // case.pp) for stage in range(case.pp)]
    for symbols in outside:
        homes = {last}
        if symbols.row.hf == (EMBEDDING,):
            homes = {0, last} if case.shape.tied else {0}
        found.append(([symbols], sorted(homes), 1))
    return found


def demands(case: Case) -> dict[tuple[int, frozenset[int]], int]:
    """Count without the plan: (rank, nearest ranks that hold them) -> elements that it needs."""
    per_stage, node = case.tp * case.dp, case.gpus_per_node
    found: dict[tuple[int, frozenset[int]], int] = collections.Counter()
    for all_of_them, stages, times in contents(case):
        held = [range(stage * per_stage, (stage + 1) * per_stage) for stage in stages]
        for t in range(case.tp):
            everyone = {r for ranks in held for r in ranks[t :: case.tp]}
            for rank in range(case.world_size):
                near = {r for r in everyone if r // node == rank // node}
                nearest = frozenset({rank} & everyone or near or everyone)
                for s in all_of_them:
                    if s.row.kind != "replicated":
                        found[rank, nearest] += times * int(s.shared[rank % case.sampler_tp, t])
        everyone = {r for ranks in held for r in ranks}
        for rank in range(case.world_size):
            near = {r for r in everyone if r // node == rank // node}
            nearest = frozenset({rank} & everyone or near or everyone)
            size = sum(s.sampler[0].size for s in all_of_them if s.row.kind == "replicated")
            found[rank, nearest] += times * size
    return found


def check_bytes(case: Case, plan: Plan) -> None:
    """Compare what each rank receives, by link class, and what the largest sender sends."""
    counts = moved(plan)
    expected = np.zeros((3, case.world_size), dtype=np.int64)
    pools: dict[int, dict[frozenset[int], int]] = {
        SAME_NODE: collections.Counter(), ACROSS: collections.Counter()
    }  # fmt: skip
    for (rank, nearest), count in demands(case).items():
        some = next(iter(nearest))
        if rank in nearest:
            link = SAME_RANK
        else:
            link = SAME_NODE if some // case.gpus_per_node == rank // case.gpus_per_node else ACROSS
            pools[link][nearest] += count
        expected[link, rank] += count
    assert (counts[:, 1] == expected).all(), str(case)
    for link, pool in pools.items():
        # However it is assigned, what only these ranks hold they have to send.
        bound = max(
            (sum(n for p, n in pool.items() if p <= ranks) / len(ranks) for ranks in pool),
            default=0,
        )
        assert counts[link, 0].max() <= 1.01 * bound, f"{case}: link class {link}"


def execute(case: Case, plan: Plan) -> None:
    """Carry out every block on integers and compare with vLLM's slices."""
    layer, outside = all_symbols(case.model, case.tp, case.sampler_tp)
    for block in plan.blocks:
        known = {s.parameter: s for s in (layer if block.layers else outside)}
        by_rank = collections.defaultdict(list)
        for move in block.moves:
            by_rank[move.destination_rank].append(move)
        names = {m.destination.parameter for m in block.moves}
        assert names == set(known) if block.layers else names <= set(known)
        for rank, moves in by_rank.items():
            tp_rank = rank % case.sampler_tp
            result = {name: np.full_like(known[name].sampler[tp_rank], -1) for name in names}
            for move in moves:
                symbols = known[move.destination.parameter]
                check_source(case, move, symbols)
                target = view(result[symbols.parameter], move.destination, symbols)
                assert (target == -1).all(), f"{case}: {move} overwrites"
                target[:] = view(symbols.trainer[move.source_rank % case.tp], move.source, symbols)
            for name, found in result.items():
                assert (found == known[name].sampler[tp_rank]).all(), f"{case}: {name} of {rank}"


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


def check(case: Case) -> None:
    plan = plan_of(case)
    check_bytes(case, plan)
    execute(case, plan)
    check_layers(case, plan)


def part_of_the_layouts(model: str) -> list[Case]:
    """Every pair of tensor-parallel sizes with each of a few pipelines, worlds and nodes."""
    found = []
    sizes = [tp for tp in (1, 2, 4, 8) if known_shape(model).num_key_value_heads % tp == 0]
    sizes += [2 * sizes[-1]]  # fewer key-value heads than ranks
    allowed = set(trainer_layouts(model))
    for tp in sizes:
        for sampler_tp in sampler_sizes(model, 64):
            # World sizes 64 and 16, a stage across nodes, part of a node, and a ragged 24 or 48.
            for pp, vpp, world, node in ((1, 1, 16, 4), (2, 2, 24, 8), (4, 1, 64, 8), (4, 3, 16, 4),
                                         (2, 1, 48, 8)):  # fmt: skip
                dp = world // (tp * pp)
                if (tp, pp, vpp, dp) in allowed and tp * pp * dp % sampler_tp == 0:
                    found.append(Case(model, tp, pp, vpp, dp, sampler_tp, node))
    return found


@pytest.mark.parametrize("model", MODELS)
def test_part_of_the_layouts(model):
    cases = part_of_the_layouts(model)
    assert len(cases) >= 12
    for case in cases:
        check(case)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("model", MODELS)
def test_all_layouts_up_to_64_ranks(model):
    for tp, pp, vpp, dp in trainer_layouts(model):
        for sampler_tp in sampler_sizes(model, tp * pp * dp):
            check(Case(model, tp, pp, vpp, dp, sampler_tp))

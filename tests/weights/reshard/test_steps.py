"""Steps of a plan executed on integers, and a plan's predicted cost.

Steps are executed rank after rank, each packed while the one before it is in flight; processes and
messages are in test_transfer.py.
"""

from __future__ import annotations

import collections
import dataclasses
import pickle
import time

import numpy as np
import pytest

from tests.weights.reshard.cases import Symbols, symbols
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.models.known import known_shape
from vapo_megatron.planning.cluster import Cluster
from vapo_megatron.planning.reshard import full_gather_cost, plan_cost
from vapo_megatron.weights.holders import TrainerLayout, trainer_layout
from vapo_megatron.weights.reshard.plan import ENGINE, Block, Layer, Move, Plan, Slice, Step
from vapo_megatron.weights.reshard.planner import make_plan
from vapo_megatron.weights.reshard.steps import buckets, steps_of
from vapo_megatron.weights.reshard.vllm_layout import check_rollout_layout
from vapo_megatron.weights.table import rows

Parameters = dict[tuple[int, str], np.ndarray]


def tiny(*, tied: bool = True) -> ModelShape:
    """4 layers, 8 heads of 4, 2 key-value heads, a vocabulary of 300 that both sides pad."""
    return dataclasses.replace(
        known_shape("Qwen2.5-0.5B"), hidden_size=32, num_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=4, ffn_hidden_size=48, vocab_size=300, tied=tied,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class World:
    """Both sides' parameters, every element a distinct integer; [rank][chunk, name]."""

    trainer: list[Parameters]
    expected: list[Parameters]


def world_of(shape: ModelShape, trainer: TrainerLayout, rollout_tp: int) -> World:
    """Build every rank's parameters under their full names, the layers' elements apart."""
    world = World([{} for _ in range(trainer.world_size)], [{} for _ in range(trainer.world_size)])
    last = trainer.pp_size - 1
    for row in rows(shape, "actor"):
        found = symbols(shape, row, trainer.tp_size, rollout_tp, trainer.vocab_rows)
        if "{}" not in row.hf[0]:
            is_embedding = row.megatron[0].startswith("embedding")
            stage, chunk = (0, 0) if is_embedding else (last, len(trainer.layers[-1]) - 1)
            if not (row.is_copy and last == 0):
                place(world, trainer, found, stage, chunk, row.megatron[0], None, 0)
            continue
        for stage, chunks in enumerate(trainer.layers):
            for chunk, (first, stop) in enumerate(chunks):
                for layer in range(first, stop):
                    name = row.megatron[0].format(layer - first)
                    place(world, trainer, found, stage, chunk, name, layer, 100_000 * layer)
    return world


def place(
    world: World,
    trainer: TrainerLayout,
    found: Symbols,
    stage: int,
    chunk: int,
    name: str,
    layer: int | None,
    offset: int,
) -> None:
    def widened(array: np.ndarray) -> np.ndarray:
        elements = np.repeat(array.astype(np.int64) + (array >= 0) * offset, found.column_width, 1)
        return elements * found.column_width + np.tile(
            np.arange(found.column_width), array.shape[1]
        )

    per_stage = trainer.tp_size * trainer.dp_size
    for rank in range(stage * per_stage, (stage + 1) * per_stage):
        world.trainer[rank][chunk, name] = widened(found.trainer[rank % trainer.tp_size])
    if not found.row.is_copy:
        theirs = found.parameter if layer is None else found.parameter.format(layer)
        for rank, expected in enumerate(world.expected):
            shard = found.sampler[rank % len(found.sampler)]
            expected[ENGINE, theirs] = np.where(
                np.repeat(shard, found.column_width, 1) < 0, -1, widened(shard)
            )


def rectangle(held: Parameters, part: Slice) -> np.ndarray:
    array = held[part.chunk, part.parameter]
    found = array[part.row : part.row + part.rows, part.column : part.column + part.columns]
    assert found.shape == (part.rows, part.columns), part
    return found


def execute(steps: list[list[Step]], world: World) -> list[Parameters]:
    """Execute the steps of all ranks; each is packed before the previous one has arrived."""
    results = [{k: np.full_like(v, -1) for k, v in held.items()} for held in world.expected]
    assert len({len(s) for s in steps}) == 1
    on_their_way: dict[tuple[int, int], list[np.ndarray]] = {}
    for step in [*range(len(steps[0])), None]:
        sent: dict[tuple[int, int], list[np.ndarray]] = {}
        for rank, mine in enumerate(steps) if step is not None else ():
            for transfer in mine[step].sends:
                assert transfer.slices and transfer.peer != rank
                held = {**world.trainer[rank], **results[rank]}
                sent[rank, transfer.peer] = [rectangle(held, s).copy() for s in transfer.slices]
            for move in mine[step].copies:
                assert move.source_rank == move.destination_rank == rank
                write(results[rank], move.destination, rectangle(world.trainer[rank], move.source))
        for rank, mine in enumerate(steps) if step else ():
            for transfer in mine[step - 1].receives:
                message = on_their_way.pop((transfer.peer, rank))
                for part, values in zip(transfer.slices, message, strict=True):
                    write(results[rank], part, values)
        if step is None:
            for rank, mine in enumerate(steps):
                for transfer in mine[-1].receives:
                    message = on_their_way.pop((transfer.peer, rank))
                    for part, values in zip(transfer.slices, message, strict=True):
                        write(results[rank], part, values)
        assert not on_their_way, "sent, and never received"
        on_their_way = sent
    return results


def write(held: Parameters, part: Slice, values: np.ndarray) -> None:
    target = rectangle(held, part)
    assert (target == -1).all() and (values >= 0).all(), part
    target[:] = values


LAYOUTS = [
    # tp, pp, vpp, dp, vLLM's tp, GPUs of a node, tied, bytes of a bucket
    (2, 2, 2, 2, 2, 4, True, 1 << 30),
    (2, 2, 2, 2, 4, 4, True, 3_000),
    (4, 2, 1, 1, 1, 4, False, 20_000),
    (1, 4, 1, 2, 1, 4, True, 9_000),
    (2, 1, 1, 4, 1, 2, True, 9_000),
    (2, 2, 1, 3, 2, 5, False, 5_000),
]


@pytest.mark.parametrize("relay", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_put_every_element_in_its_place(layout, relay):
    tp, pp, vpp, dp, rollout_tp, node, tied, bucket_bytes = layout
    shape = tiny(tied=tied)
    trainer = trainer_layout(
        shape, tp_size=tp, pp_size=pp, vpp_size=vpp, dp_size=dp, make_vocab_size_divisible_by=8
    )
    plan = make_plan(shape, trainer, rollout_tp, gpus_per_node=node, relay=relay)
    world = world_of(shape, trainer, rollout_tp)
    steps = [steps_of(plan, rank, bucket_bytes) for rank in range(plan.world_size)]
    for found, expected in zip(execute(steps, world), world.expected, strict=True):
        assert all((found[name] == expected[name]).all() for name in expected)
    for mine in steps:
        for step in mine:
            for transfers in (step.sends, step.receives):
                assert 2 * sum(t.num_elements for t in transfers) <= bucket_bytes
    assert any(b.relays for b in plan.blocks) == (relay and node < plan.world_size and pp > 1)


def test_a_rank_s_list_is_what_its_steps_do():
    shape = tiny()
    trainer = trainer_layout(shape, tp_size=2, pp_size=2, vpp_size=2, dp_size=2)
    plan = make_plan(shape, trainer, 2, gpus_per_node=4)
    for rank in range(8):
        steps = steps_of(plan, rank)
        received = sorted(s for step in steps for t in step.receives for s in t.slices)
        copied = sorted(m.destination for step in steps for m in step.copies)
        sent = sorted(s for step in steps for t in step.sends for s in t.slices)
        moves = plan.received(rank)
        assert received == sorted(m.destination for m in moves if m.source_rank != rank)
        assert copied == sorted(m.destination for m in moves if m.source_rank == rank)
        assert sent == sorted(m.source for m in plan.sent(rank))


def test_plans_pickle_and_repeat():
    shape = tiny()
    trainer = trainer_layout(shape, tp_size=2, pp_size=2, dp_size=2)
    plans = [make_plan(shape, trainer, 2, gpus_per_node=4) for _ in range(2)]
    assert plans[0] == plans[1] == pickle.loads(pickle.dumps(plans[0]))
    steps = steps_of(plans[0], 3)
    assert steps == pickle.loads(pickle.dumps(steps))


def test_a_bucket_that_is_too_small_is_refused():
    shape = tiny()
    trainer = trainer_layout(shape, tp_size=2, pp_size=2, dp_size=2)
    plan = make_plan(shape, trainer, 2, gpus_per_node=4)
    with pytest.raises(ConfigError, match=r"bucket_bytes=100 must hold .*; raise it"):
        steps_of(plan, 0, 100)


@pytest.mark.parametrize(
    ("tp_size", "message"),
    [
        (3, "rollout.tensor_model_parallel_size=3 must divide the model's num_attention_heads=40"),
        (
            8,
            "tensor_model_parallel_size=8 must divide the number of processes that sample, 12",
        ),
    ],
)
def test_what_vllm_could_not_load_is_refused(tp_size, message):
    with pytest.raises(ConfigError, match=message):
        check_rollout_layout(known_shape("Qwen2.5-32B"), tp_size, world_size=12)


def part_of(rows_: int, columns: int) -> Slice:
    return Slice(0, "weight", 0, 0, rows_, columns)


def test_cost_of_a_plan_by_hand():
    # Two nodes of two GPUs, elements of 2 bytes. Rank 0 copies 2 GB, sends 9 GB within its node and
    # 1 GB across: 20 ms at 450 and at 50 GB/s. Through memory it reads and writes 2 + 9 + 1 GB,
    # 24 GB at 2400 GB/s: 10 ms more.
    slices = [part_of(10**6, columns) for columns in (1000, 4500, 500)]
    moves = tuple(Move(to, 0, s, s) for to, s in zip((0, 1, 2), slices, strict=True))
    plan = Plan(4, 2, 2, (Block(moves),))
    cluster = Cluster(4, gpus_per_node=2, memory_gb_per_second=2400).at_peak()
    cost = plan_cost(plan, cluster, bucket_bytes=10**11)
    assert cost.sent.tolist() == [[2e9, 0, 0, 0], [9e9, 0, 0, 0], [1e9, 0, 0, 0]]
    assert cost.received.tolist() == [[2e9, 0, 0, 0], [0, 9e9, 0, 0], [0, 0, 1e9, 0]]
    assert cost.seconds == pytest.approx(0.030, rel=1e-12)
    # In buckets of 5 GB each matrix is cut in two, and the time is the same.
    assert len(buckets(plan, 5 * 10**9)) == 2
    assert plan_cost(plan, cluster, 5 * 10**9).seconds == pytest.approx(0.030, rel=1e-12)


def test_cost_of_a_full_gather_by_hand():
    # Elements of 2 bytes. A layer: q and o 32 * 32, k and v 8 * 32, their biases 48, gate, up and
    # down 48 * 32, norms 2 * 32. A shard of TP 2: (1024 + 2 * 256 + 48 + 1024 + 3 * 1536) / 2 + 64
    # = 3672. Embedding: 304 rows of padding to 8 * 2, half of them: 152 * 32 = 4864.
    # Stage 0: 2 * 3672 + 4864 = 12208 elements; stage 1: 2 * 3672 + 32 of the final norm = 7376.
    shape = tiny()
    trainer = trainer_layout(shape, tp_size=2, pp_size=2, dp_size=1, make_vocab_size_divisible_by=8)
    cluster = Cluster(4, gpus_per_node=2, memory_gb_per_second=200).at_peak()
    cost = full_gather_cost(shape, trainer, 2, cluster)
    first, second = 2 * 12208, 2 * 7376
    assert cost.received[0].tolist() == [first, first, second, second]
    # Around the tensor-parallel pair, within a node: the other's shard of both stages.
    assert cost.received[1].tolist() == [first + second] * 4
    # Along the pipeline, across nodes: the other stage.
    assert cost.received[2].tolist() == [second, second, first, first]
    # Through memory, read and written: both ranks' shards, and half of them again for a vLLM shard.
    memory = 2 * 2 * (first + second) * 1.5 / 200e9
    seconds = (first + second) / 50e9 + (first + second) / 450e9 + memory
    assert cost.seconds == pytest.approx(seconds, rel=1e-9)


def test_a_plan_for_128_ranks_is_quick_and_beats_gathering():
    shape = known_shape("Qwen2.5-32B")
    trainer = trainer_layout(shape, tp_size=8, pp_size=4, dp_size=4)
    cluster = Cluster(num_gpus=128).at_peak()
    started = time.process_time()
    plan = make_plan(shape, trainer, 4, gpus_per_node=8)
    cost = plan_cost(plan, cluster)
    steps_of(plan, 77)
    assert time.process_time() - started < 10
    gathered = full_gather_cost(shape, trainer, 4, cluster)
    # Each of 16 nodes holds one stage and is missing the other three: 3/4 of 65.5 GB, over 8 GPUs.
    assert cost.received[2].mean() == pytest.approx(0.75 * 65.5e9 / 8, rel=0.01)
    # No step leaves a stage idle, so the time is close to that of the busiest link alone.
    assert cost.seconds < 1.4 * cost.sent[2].max() / 50e9
    assert cost.seconds < gathered.seconds / 1.9
    direct = plan_cost(make_plan(shape, trainer, 4, gpus_per_node=8, relay=False), cluster)
    assert direct.received[2].mean() == pytest.approx(2 * cost.received[2].mean(), rel=0.01)


def test_layers_of_virtual_stages():
    # 8 layers, 2 stages, 2 chunks each: stage 0 holds 0, 1 and 4, 5, stage 1 holds 2, 3 and 6, 7.
    shape = dataclasses.replace(tiny(), num_layers=8)
    trainer = trainer_layout(shape, tp_size=1, pp_size=2, vpp_size=2, dp_size=1)
    assert trainer.layers == (((0, 2), (4, 6)), ((2, 4), (6, 8)))
    plan = make_plan(shape, trainer, 1, gpus_per_node=2)
    assert plan.blocks[1].layers == (Layer(2, 0, 0), Layer(3, 0, 1), Layer(6, 1, 0), Layer(7, 1, 1))


def test_transformer_engine_names():
    shape = tiny()
    trainer = trainer_layout(shape, tp_size=1, pp_size=1, dp_size=1, transformer_engine=True)
    (block, *_) = make_plan(shape, trainer, 1, gpus_per_node=1).blocks
    names = collections.Counter(move.source.parameter for move in block.moves)
    assert names["decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight"] == 1
    assert names["decoder.layers.{}.mlp.linear_fc1.layer_norm_weight"] == 1

"""A plan executed over gloo: any bucket size, uneven steps, bounded buffers, counted bytes.

The sampler's weights are bare tensors here; what they must hold is cut from the HF file by hand.
Does not exercise: vLLM (test_sync.py), NCCL, GPUs, a pipeline of virtual stages under vLLM.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from tests.weights.loaded import Layout, load
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.weights.holders import trainer_layout
from vapo_megatron.weights.reshard.plan import ENGINE, LiveWeight, Move, Slice, Step, Transfer
from vapo_megatron.weights.reshard.planner import make_plan
from vapo_megatron.weights.reshard.steps import steps_of
from vapo_megatron.weights.reshard.sync import all_weights
from vapo_megatron.weights.reshard.transfer import execute
from vapo_megatron.weights.reshard.verify import destination_problems, source_problems

CPU = torch.device("cpu")


def _expected(path, tp_size, tp_rank, dtype):
    """vLLM's shard of a directory with 4 layers, 4 heads, 2 key-value heads and 300 tokens."""
    file = load_file(path / "model.safetensors")

    def rows(name):
        return file[name].chunk(tp_size)[tp_rank]

    def heads(name):
        # TP 4: ranks 0 and 1 hold key-value head 0.
        parts = min(tp_size, 2)
        return file[name].chunk(parts)[tp_rank * parts // tp_size]

    found = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded = torch.nn.functional.pad(file[name], (0, 0, 0, 20))
        found[name] = padded.chunk(tp_size)[tp_rank]
    found["model.norm.weight"] = file["model.norm.weight"]
    for layer in range(4):
        p = f"model.layers.{layer}."
        for kind in ("weight", "bias"):
            q, k, v = (f"{p}self_attn.{x}_proj.{kind}" for x in "qkv")
            found[f"{p}self_attn.qkv_proj.{kind}"] = torch.cat([rows(q), heads(k), heads(v)])
        gate, up = (f"{p}mlp.{x}_proj.weight" for x in ("gate", "up"))
        found[f"{p}mlp.gate_up_proj.weight"] = torch.cat([rows(gate), rows(up)])
        for name in (f"{p}self_attn.o_proj.weight", f"{p}mlp.down_proj.weight"):
            found[name] = file[name].chunk(tp_size, dim=1)[tp_rank]
        for name in (f"{p}input_layernorm.weight", f"{p}post_attention_layernorm.weight"):
            found[name] = file[name]
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def _bits(tensors):
    return {n: t.contiguous().view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}


def _carried_out(path, case, bucket_bytes, during=contextlib.nullcontext):
    """For each bucket size: (bytes received, bytes planned, steps, names that differ)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout, rollout_tp, dtype, gpus_per_node = case
    loaded = load(str(path), layout)
    sizes = {"tp_size": layout.tp, "pp_size": layout.pp, "vpp_size": layout.vpp or 1}
    trainer = trainer_layout(
        loaded.shape, **sizes, dp_size=world_size // layout.world_size,
        make_vocab_size_divisible_by=64,
    )  # fmt: skip
    plan = make_plan(
        loaded.shape, trainer, rollout_tp, gpus_per_node=gpus_per_node,
        bytes_per_element=dtype.itemsize, relay=gpus_per_node < world_size,
    )  # fmt: skip
    num_relays = sum(len(block.relays) for block in plan.blocks)
    expected = _expected(path, rollout_tp, rank % rollout_tp, dtype)
    planned = sum(m.source.num_elements for m in plan.received(rank) if m.source_rank != rank)
    found = []
    for size in bucket_bytes:
        live = {n: LiveWeight(torch.zeros_like(t), 0) for n, t in expected.items()}
        weights = all_weights(loaded.chunks, live)
        steps = steps_of(plan, rank, size)
        with during(weights):
            received = execute(steps, weights, dtype, CPU)
        held = _bits({n: weight.tensor for n, weight in live.items()})
        wrong = [n for n, bits in _bits(expected).items() if bits != held[n]]
        found.append((received, planned * dtype.itemsize, len(steps), wrong))
    return num_relays, found


CASES = {
    # Megatron's layout, vLLM's TP, type in vLLM, ranks on a node
    "tp2 to 2 x tp1": (Layout(2, 1), 1, torch.float32, 8),
    "pp2 to tp2, rounded": (Layout(1, 2), 2, torch.bfloat16, 8),
    "tp2 pp2 vpp2 to 2 x tp2": (Layout(2, 2, 2), 2, torch.float32, 8),
    "pp2 dp2 to tp4, rounded": (Layout(1, 2), 4, torch.bfloat16, 8),
    "tp4 to 4 x tp1 on 2 nodes": (Layout(4, 1), 1, torch.float32, 2),
    "tp2 pp2 to 4 x tp1 on 2 nodes": (Layout(2, 2), 1, torch.float32, 2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_bucket_size_gives_the_files_bits(workers, tmp_path, case):
    path = write_tiny_hf(tmp_path)
    world_size = max(case[0].world_size, case[1])
    results = workers.run(world_size, _carried_out, path, case, (8_000, 30_000, 512 << 20))
    steps = []
    for num_relays, rank in results:
        assert [wrong for *_, wrong in rank] == [[]] * 3
        assert all(received == planned for received, planned, *_ in rank)
        # Two ranks of a node miss the same: each gets a part from the other node and relays it.
        assert (num_relays > 0) == (case[3] == 2)
        steps.append([count for _, _, count, _ in rank])
    # The same number on every rank.
    assert steps == steps[:1] * world_size
    many, some, one = steps[0]
    assert many > some > one
    # The last relays need a step of their own, plan.RELAY_LAG later.
    assert one == (3 if case[3] == 2 else 1)


def _allocated(path, limit):
    """Bytes of each storage allocated during one execution, and its outcome."""
    sizes = {}

    class Counting(TorchFunctionMode):
        def __init__(self, weights):
            super().__init__()
            self.known = {t.untyped_storage().data_ptr() for t in weights.values()}

        def __torch_function__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                storage = torch.Tensor.untyped_storage(made)
                if (place := storage.data_ptr()) not in self.known:
                    sizes[place] = storage.nbytes()
            return made

    result = _carried_out(path, CASES["tp2 to 2 x tp1"], (limit,), Counting)
    return list(sizes.values()), result


def test_buffers_are_two_pairs_of_buckets(workers, tmp_path):
    path = write_tiny_hf(tmp_path)
    for sizes, result in workers.run(2, _allocated, path, 20_000):
        _, ((_, _, steps, wrong),) = result
        assert wrong == [] and steps > 10
        # Nothing else in all steps: two for sending, two for receiving.
        assert len(sizes) == 4 and all(0 < size <= 20_000 for size in sizes)


def _uneven():
    """Rank 2 has two steps without a message; 0 and 1 talk in all, in both directions and in one.

    Rank 0 holds 0, 1, 2, ..., rank 1 holds 100, 101, ...; column 0 to 4 of one row each.
    """
    rank = dist.get_rank()
    row = {r: Slice(0, "a", 0, c, 1, 1) for c, r in enumerate("abcde")}
    into = {r: part._replace(chunk=ENGINE) for r, part in row.items()}
    to = {
        0: [Step((), (Transfer(1, (row["a"],)),), (Transfer(1, (into["b"],)),)),
            Step((), (Transfer(1, (row["b"], row["c"])),), ()),
            Step((), (Transfer(1, (row["e"],)), Transfer(2, (row["e"],))), ())],
        1: [Step((), (Transfer(0, (row["e"],)),), (Transfer(0, (into["a"],)),)),
            Step((), (), (Transfer(0, (into["d"], into["c"])),)),
            Step((), (), (Transfer(0, (into["b"],)),))],
        2: [Step((), (), ()),
            Step((Move(2, 2, row["a"], into["c"]),), (), ()),
            Step((), (), (Transfer(0, (into["d"],)),))],
    }  # fmt: skip
    source, target = torch.arange(5.0)[None] + 100 * rank, torch.full((1, 5), -1.0)
    weights = {(0, "a"): source, (ENGINE, "a"): target}
    received = [execute(to[rank], weights, torch.float32, CPU) for _ in range(20)]
    return target[0].tolist(), set(received)


def test_uneven_steps_do_not_block(workers):
    # Rank 0 gets 1's last; 1 gets 0's first, then its 1 and 2 turned round, then its last.
    assert workers.run(3, _uneven) == [
        ([-1, 104, -1, -1, -1], {4}),
        ([0, 4, 2, 1, -1], {16}),
        ([-1, -1, 200, 4, -1], {4}),
    ]


def _weights(**shapes):
    return {name: LiveWeight(torch.zeros(shape), 0) for name, shape in shapes.items()}


def _into(parameter, row, column, rows, columns):
    part = Slice(0, parameter, row, column, rows, columns)
    return Move(0, 0, part, part)


def test_what_is_not_covered_exactly_once_is_named():
    weights = _weights(matrix=(4, 6), vector=(3,), cube=(2, 2, 2))
    weights["padded"] = LiveWeight(torch.zeros(5, 2), 2)
    fits = [
        _into("matrix", 0, 0, 4, 2), _into("matrix", 0, 2, 1, 4), _into("matrix", 1, 2, 3, 4),
        _into("vector", 0, 0, 3, 1), _into("padded", 0, 0, 3, 2),
    ]  # fmt: skip
    found = destination_problems(fits, weights, torch.float32)
    assert found == ["cube has 3 dimensions, more than 2"]
    del weights["cube"]
    assert destination_problems(fits, weights, torch.float32) == []
    for moves, text in (
        (fits[1:], "matrix gets 16 of its 24 elements"),
        (fits[:3] + fits[4:], "vector gets 0 of its 3 elements"),
        ([*fits, fits[0]], "matrix is written twice"),
        ([*fits, _into("matrix", 3, 5, 1, 1)], "matrix is written twice"),
        # As many elements as it has, but one twice and one not at all.
        ([_into("matrix", 0, 1, 1, 1), *fits[:1], *fits[2:], _into("matrix", 0, 3, 1, 3)], "twice"),
        (fits[:4] + [_into("padded", 0, 0, 4, 2)], "padded of [3, 2] without padding does not"),
        (fits[:3] + [_into("vector", 0, 0, 3, 2), fits[4]], "vector of [3, 1] without padding"),
        ([*fits, _into("other", 0, 0, 1, 1)], "other is not in the engine"),
    ):
        (problem,) = destination_problems(moves, weights, torch.float32)
        assert text in problem
    wrong = destination_problems(fits, weights, torch.bfloat16)
    assert wrong[0] == "matrix is torch.float32, not torch.bfloat16"


def test_what_the_trainer_lacks_is_named():
    weights = {(0, "matrix"): torch.zeros(4, 6), (1, "vector"): torch.zeros(3)}
    assert source_problems([_into("matrix", 1, 1, 3, 5)], weights) == []
    for move, text in (
        (_into("matrix", 1, 1, 4, 5), "to be sent is not within (4, 6)"),
        (_into("vector", 0, 0, 3, 1), "vector is not in chunk 0 to be sent"),
    ):
        (problem,) = source_problems([move], weights)
        assert text in problem

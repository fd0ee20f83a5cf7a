"""The pure half of weights/: golden layouts of shards, and the name table against counts.

Does not exercise: a model built with Transformer Engine (its names are tried on a stand-in module
here, and on its layers in tests/gpu/test_transformer_engine.py).
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.config import ParallelConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape, read_model_shape
from vapo_megatron.models.layout_rules import check_layout
from vapo_megatron.weights import holders, layout
from vapo_megatron.weights.parameters import local_parameters
from vapo_megatron.weights.table import TABLE, hf_tensors, parameter_count

KINDS = ("vocabulary", "qkv", "gate_up", "row", "replicated")


@pytest.fixture
def shape(tmp_path) -> ModelShape:
    return read_model_shape(write_tiny_hf(tmp_path))


def test_qkv_is_interleaved_by_key_value_head():
    # 4 query heads, 2 key-value heads, head size 1: group 0 holds q0 q1 k0 v0, group 1 q2 q3 k1 v1.
    merged = layout.merge_qkv(
        torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21]), num_groups=2
    )
    assert merged.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


# Heads of 2 rows: 4 query heads a to d, and the key-value heads' keys (upper case) and values.
# Interleaved, one key-value head: a a b b c c d d K K v v; two: a a b b K K v v  c c d d L L w w.
FEW_HEADS = {
    # 12 rows over 4 ranks: the second rank holds half of query head b, all of c.
    (1, 4): [((0, 3), (0, 0), (0, 0)), ((3, 6), (0, 0), (0, 0)), ((6, 8), (0, 1), (0, 0)),
             ((8, 8), (1, 2), (0, 2))],
    (1, 2): [((0, 6), (0, 0), (0, 0)), ((6, 8), (0, 2), (0, 2))],
    # 16 rows over 4 ranks: query heads alone, then a key and a value head alone.
    (2, 4): [((0, 4), (0, 0), (0, 0)), ((4, 4), (0, 2), (0, 2)), ((4, 8), (2, 2), (2, 2)),
             ((8, 8), (2, 4), (2, 4))],
    # A key-value head or more for each rank: equal parts of each tensor.
    (2, 2): [((0, 4), (0, 2), (0, 2)), ((4, 8), (2, 4), (2, 4))],
    (4, 2): [((0, 4), (0, 4), (0, 4)), ((4, 8), (4, 8), (4, 8))],
}  # fmt: skip


@pytest.mark.parametrize(("num_groups", "tp_size"), FEW_HEADS)
def test_qkv_shards_are_chunks_of_the_interleaved_rows(num_groups, tp_size):
    sizes = [8, 2 * num_groups, 2 * num_groups]
    full = [torch.arange(size) + 100 * i for i, size in enumerate(sizes)]
    whole = layout.merge_qkv(*full, num_groups=num_groups)
    for rank, expected in enumerate(FEW_HEADS[num_groups, tp_size]):
        bounds = holders.part_bounds(
            "qkv", sizes, rank, tp_size, num_groups=num_groups, padded_rows=0
        )
        assert tuple(bounds) == expected
        parts = [tensor[a:b] for tensor, (a, b) in zip(full, bounds)]
        shard = layout.merge("qkv", parts, num_groups=num_groups, tp_size=tp_size, num_rows=0)
        assert torch.equal(shard, whole.chunk(tp_size)[rank])


def test_gate_stands_before_up_on_each_rank():
    gate, up = torch.arange(4)[:, None], 10 + torch.arange(4)[:, None]
    shards = [
        layout.merge("gate_up", [gate[a:b], up[a:b]], num_groups=1, tp_size=2, num_rows=4)
        for a, b in (holders.bounds(4, rank, 2) for rank in (0, 1))
    ]
    assert [s.flatten().tolist() for s in shards] == [[0, 1, 10, 11], [2, 3, 12, 13]]


def test_vocabulary_is_padded_with_zero_rows_at_its_end():
    # 5 rows padded to 8 over 4 ranks of 2: [0, 2) [2, 4) [4, 5) and an empty part.
    bounds = []
    for rank in range(4):
        bounds += holders.part_bounds("vocabulary", [5], rank, 4, num_groups=1, padded_rows=8)
    assert bounds == [(0, 2), (2, 4), (4, 5), (5, 5)]
    rows = 1 + torch.arange(5.0)[:, None]
    shards = [
        layout.merge("vocabulary", [rows[a:b]], num_groups=1, tp_size=4, num_rows=2)
        for a, b in bounds
    ]
    assert torch.cat(shards).flatten().tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    (full,) = layout.join("vocabulary", shards, num_groups=1, head_dim=1, num_rows=5)
    assert torch.equal(full, rows)


def test_join_undoes_merge_for_any_number_of_ranks(subtests):
    for groups, kind, tp_size in itertools.product((1, 2, 4), KINDS, (1, 2, 4)):
        with subtests.test(groups=groups, kind=kind, tp_size=tp_size):
            check_join_undoes_merge(groups, kind, tp_size)


def check_join_undoes_merge(groups, kind, tp_size):
    # The interleaved rows, (8 + 2 * groups) * 2, divide by 4; with 1 group each rank has 2.5 heads.
    heads, head_dim, hidden = 8, 2, 16
    sizes = {
        "vocabulary": [(21, hidden)],
        "qkv": [
            (heads * head_dim, hidden),
            (groups * head_dim, hidden),
            (groups * head_dim, hidden),
        ],
        "gate_up": [(20, hidden), (20, hidden)],
        "row": [(hidden, 20)],
        "replicated": [(hidden,)],
    }[kind]
    full = [torch.randn(size) for size in sizes]
    dim = holders.shard_dim(kind)

    def parts(rank):
        if dim is None:
            return full
        lengths = [tensor.shape[dim] for tensor in full]
        bounds = holders.part_bounds(
            kind, lengths, rank, tp_size, num_groups=groups, padded_rows=24
        )
        return [t.narrow(dim, a, b - a) for t, (a, b) in zip(full, bounds)]

    rows = 24 // tp_size
    shards = [
        layout.merge(kind, parts(rank), num_groups=groups, tp_size=tp_size, num_rows=rows)
        for rank in range(tp_size)
    ]
    back = layout.join(kind, shards, num_groups=groups, head_dim=head_dim, num_rows=21)
    assert len(back) == len(full)
    assert all(torch.equal(a, b) for a, b in zip(back, full))


def test_every_layout_that_is_accepted_can_be_cut(shape):
    accepted = 0
    for heads, groups, head_dim, tp_size in itertools.product(
        (2, 3, 4, 6, 8, 12), (1, 2, 3, 4), (2, 6, 8), range(1, 13)
    ):
        if heads % groups:
            continue
        model = dataclasses.replace(
            shape,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            head_dim=head_dim,
            ffn_hidden_size=tp_size,
        )
        try:
            check_layout(model, ParallelConfig(tensor_model_parallel_size=tp_size))
        except ConfigError:
            continue
        accepted += 1
        full = [torch.arange(n * head_dim) for n in (heads, groups, groups)]
        whole = layout.merge_qkv(*full, num_groups=groups)
        for rank in range(tp_size):
            bounds = holders.part_bounds(
                "qkv", [len(x) for x in full], rank, tp_size, num_groups=groups, padded_rows=0
            )
            parts = [x[a:b] for x, (a, b) in zip(full, bounds)]
            shard = layout.merge("qkv", parts, num_groups=groups, tp_size=tp_size, num_rows=0)
            assert torch.equal(shard, whole.chunk(tp_size)[rank]), (model, tp_size, rank)
    assert accepted > 100


def test_cutting_unevenly_is_an_assertion():
    with pytest.raises(AssertionError, match="3 is not a multiple"):
        holders.bounds(3, 0, 2)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_table_holds_every_parameter_once(shape, tied, qk_norm):
    shape = dataclasses.replace(shape, tied=tied, qk_norm=qk_norm, qkv_bias=not qk_norm)
    for role in ("actor", "critic"):
        sizes = hf_tensors(shape, role).values()
        count = sum(torch.Size(size).numel() for size in sizes)
        assert count == parameter_count(shape, value_head=role == "critic")
        # 64 channels, 4 heads and 2 key-value heads of 16, 96 in between, 300 tokens, 4 layers.
        layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
        layer += 2 * 16 if qk_norm else 64 + 2 * 32
        output = 64 if role == "critic" else 0 if tied else 300 * 64
        assert count == 300 * 64 + 4 * layer + 64 + output


class _Layer(torch.nn.Module):
    def __init__(self, number: int, names: list[str]) -> None:
        super().__init__()
        self.layer_number = number
        _add(self, names)


def _add(module: torch.nn.Module, names: list[str]) -> None:
    for name in names:
        *path, leaf = name.split(".")
        inner = module
        for part in path:
            if not hasattr(inner, part):
                inner.add_module(part, torch.nn.Module())
            inner = getattr(inner, part)
        inner.register_parameter(leaf, torch.nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_both_layer_implementations_and_any_layer_numbers_are_matched(shape, implementation):
    # A middle chunk whose two layers are the model's third and fourth, wrapped as DDP wraps it.
    prefix = "decoder.layers.{}."
    pick = 0 if implementation == "local" else -1
    names = [
        row.megatron[pick].removeprefix(prefix)
        for row in TABLE
        if row.megatron[0].startswith(prefix) and row.when(shape, "actor")
    ]
    fused = "self_attention.linear_qkv.layer_norm_weight" in names
    assert fused == (implementation == "transformer_engine")
    chunk, wrapper = torch.nn.Module(), torch.nn.Module()
    chunk.decoder = torch.nn.Module()
    chunk.decoder.layers = torch.nn.ModuleList([_Layer(3, names), _Layer(4, names)])
    wrapper.module = chunk
    found = local_parameters([wrapper], shape, "actor")
    hf_names = [name for p in found for name in p.hf_names]
    expected = [n for n in hf_tensors(shape, "actor") if ".layers.2." in n or ".layers.3." in n]
    assert sorted(hf_names) == sorted(expected)


def test_a_parameter_outside_the_table_is_an_assertion(shape):
    chunk = torch.nn.Module()
    _add(chunk, ["decoder.surprise.weight"])
    with pytest.raises(AssertionError, match=r"decoder\.surprise\.weight of the actor"):
        local_parameters([chunk], shape, "actor")

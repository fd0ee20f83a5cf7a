"""Mixtures of experts in files: converted, loaded and exported bit for bit in any layout."""

import math

import pytest
import torch
from safetensors.torch import load_file

from tests.weights.convert.converted import assert_same, read, rewrite, to_hf, to_megatron
from tests.weights.loaded import Layout, all_parameters, load
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.errors import CheckpointError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel import groups
from vapo_megatron.weights.export_hf import export_hf
from vapo_megatron.weights.gather import gather_hf_tensors
from vapo_megatron.weights.hf_reader import HfReader
from vapo_megatron.weights.load_hf import check_hf_tensors
from vapo_megatron.weights.table import hf_tensors, rows, shift_expert

LAYOUTS = [
    Layout(), Layout(2, ep=2), Layout(pp=2, ep=1), Layout(cp=2, ep=2), Layout(2, 2, ep=2),
    Layout(2, cp=2, ep=4), Layout(2, cp=2, ep=2), Layout(pp=2, vpp=2, cp=2, ep=2),
]  # fmt: skip
FEW = [Layout(2, ep=2), Layout(pp=2, vpp=2, cp=2, ep=2)]
SOME_DENSE = {"mlp_only_layers": [1], "norm_topk_prob": False}
MIXTURE = {"family": "qwen3_moe", "head_dim": 32, "dtype": torch.bfloat16}


def mixture(directory, **options):
    return write_tiny_hf(directory, **{**MIXTURE, **options})


def packed(directory):
    """As newer checkpoints hold experts: a layer's in two tensors."""
    hf = mixture(directory)

    def pack(tensors):
        for layer in range(4):
            stem = f"model.layers.{layer}.mlp.experts."
            own = [
                [tensors.pop(f"{stem}{e}.{x}_proj.weight") for x in ("gate", "up", "down")]
                for e in range(8)
            ]
            tensors[stem + "gate_up_proj"] = torch.stack([torch.cat(w[:2]) for w in own])
            tensors[stem + "down_proj"] = torch.stack([w[2] for w in own])

    rewrite(hf, pack)
    assert len(load_file(hf / "model.safetensors")) < 60
    return hf


def test_experts_are_numbered_from_0_on_each_rank():
    for name in (
        "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight",
        "decoder.layers.3.mlp.experts.linear_fc2.weight5", "model.layers.3.mlp.experts.5.up_proj",
    ):  # fmt: skip
        assert shift_expert(name, -4) == name.replace("5", "1")
    for name in ("decoder.layers.7.mlp.linear_fc1.weight", "model.layers.7.mlp.gate.weight"):
        assert shift_expert(name, -4) == name


def test_the_table_has_transformers_tensors(tmp_path):
    hf = mixture(tmp_path / "hf", config=SOME_DENSE)
    shape = read_model_shape(hf)
    assert (shape.expert_layers, shape.dense_layers) == ((0, 2, 3), (1,))
    files = load_file(hf / "model.safetensors")
    assert hf_tensors(shape, "actor") == {name: tuple(t.shape) for name, t in files.items()}
    routers = [row for row in rows(shape, "actor") if row.hf[0].endswith("mlp.gate.weight")]
    assert [row.is_layer_matrix(shape) for row in routers] == [False]


@pytest.mark.parametrize(
    "config",
    [pytest.param({}, marks=pytest.mark.slow, id="all"), pytest.param(SOME_DENSE, id="some")],
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_conversion_there_and_back(tmp_path, layout, config):
    hf = mixture(tmp_path / "hf", config=config, num_files=2)
    options = ("--expert-model-parallel-size", layout.ep)
    assert to_megatron(hf, tmp_path / "m", layout, *options) == 0
    assert to_hf(tmp_path / "m", tmp_path / "b") == 0
    assert_same(read(tmp_path / "b"), read(hf))
    ranks = math.lcm(layout.tp, layout.ep) * layout.pp
    assert {f.name for f in (tmp_path / "m").glob("*.distcp")} == {
        f"__{rank}_0.distcp" for rank in range(ranks)
    }


def loaded_and_exported(hf, converted, layout, out):
    """Are parameters from both the same? Exports; returns what gather_hf_tensors yields."""
    settings = {"dtype": "bfloat16"}
    expected = load(hf, layout, **settings)
    groups.destroy()
    found = load(converted, layout, **settings)
    pairs = zip(all_parameters(expected.chunks), all_parameters(found.chunks), strict=True)
    same = all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    export_hf(found.chunks, found.shape, found.ranks, out, hf, max_file_bytes=40_000)
    gathered = gather_hf_tensors(found.chunks, found.shape, found.ranks, bucket_bytes=30_000)
    return same, {name: tensor.clone() for name, tensor in gathered}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=[] if x in FEW else pytest.mark.slow) for x in LAYOUTS],
    ids=str,
)
def test_loaded_gathered_and_exported(workers, tmp_path, layout):
    """The checkpoint was converted for other ranks than load it."""
    hf = mixture(tmp_path / "hf", config=SOME_DENSE)
    assert to_megatron(hf, tmp_path / "m", Layout(), "--expert-model-parallel-size", 8) == 0
    arguments = (str(hf), str(tmp_path / "m"), layout, str(tmp_path / "out"))
    for same, gathered in workers.run(layout.world_size, loaded_and_exported, *arguments):
        assert same
        assert_same(gathered, read(hf))
    assert_same(read(tmp_path / "out"), read(hf))


def test_packed_experts_are_read_by_their_own_names(workers, tmp_path):
    hf, plain = packed(tmp_path / "packed"), mixture(tmp_path / "plain")
    reader = HfReader(hf)
    check_hf_tensors(reader, read_model_shape(hf), "actor")
    for name, tensor in read(plain).items():
        assert torch.equal(reader.read(name), tensor), name
        assert torch.equal(reader.read(name, 0, 3, 17), tensor[3:17]), name
    for number, source in enumerate((hf, plain)):
        assert to_megatron(source, tmp_path / f"m{number}", Layout(2)) == 0
        assert to_hf(tmp_path / f"m{number}", tmp_path / f"b{number}") == 0
    assert_same(read(tmp_path / "b0"), read(tmp_path / "b1"))
    layout = Layout(2, ep=2)
    arguments = (str(hf), str(tmp_path / "m1"), layout, str(tmp_path / "out"))
    for same, _ in workers.run(2, loaded_and_exported, *arguments):
        assert same


def test_a_lacking_expert_is_named(tmp_path):
    hf = mixture(tmp_path / "hf")
    rewrite(hf, lambda tensors: tensors.pop("model.layers.2.mlp.experts.5.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.5\.up_proj.*is missing"):
        check_hf_tensors(HfReader(hf), read_model_shape(hf), "actor")

"""Loading HF directories: what each rank reads, what is refused, and what a critic starts from.

The round trip back to HF is in test_export_hf.py. Does not exercise: GPUs, files of
several GB.
"""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from tests.weights.convert.converted import rewrite
from tests.weights.loaded import Layout, all_parameters, forward, load, make_config
from tests.weights.tiny_hf import write_tiny_hf, write_tiny_reward_model
from vapo_megatron.errors import CheckpointError
from vapo_megatron.models.build import build_model
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel import groups
from vapo_megatron.weights import hf_reader
from vapo_megatron.weights.hf_reader import HfReader
from vapo_megatron.weights.load_hf import check_hf_tensors, load_hf_weights
from vapo_megatron.weights.parameters import local_parameters

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ONE = Layout()


class _CountingSlice:
    """A safetensors slice that counts the bytes read."""

    def __init__(self, source, counts, name):
        self.source, self.counts, self.name = source, counts, name

    def __getitem__(self, item):
        part = self.source[item]
        self.counts[self.name] = self.counts.get(self.name, 0) + part.nbytes
        return part

    def __getattr__(self, attribute):
        return getattr(self.source, attribute)


class _CountingFile:
    def __init__(self, source, counts):
        self.source, self.counts = source, counts

    def keys(self):
        return self.source.keys()

    def get_slice(self, name):
        return _CountingSlice(self.source.get_slice(name), self.counts, name)


def _count_bytes(path, layout):
    counts, original = {}, hf_reader.safe_open
    hf_reader.safe_open = lambda *a, **k: _CountingFile(original(*a, **k), counts)
    try:
        loaded = load(path, layout)
    finally:
        hf_reader.safe_open = original
    mine = {
        name for p in local_parameters(loaded.chunks, loaded.shape, "actor") for name in p.hf_names
    }
    finite = all(p.isfinite().all() for _, p in all_parameters(loaded.chunks))
    return counts, mine, loaded.num_bytes, finite


READING = [
    *((layout, kv_heads, "qwen2") for layout, kv_heads in (
        (Layout(2, 1), 2), (Layout(1, 2), 2), (Layout(2, 2), 2), (Layout(4, 1), 2),
        (Layout(4, 1), 1), (Layout(2, 2), 1),
    )),
    (Layout(2, 2), 2, "qwen3"), (Layout(4, 1), 2, "qwen3"), (Layout(2, 2), 2, "llama"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "kv_heads", "family"), READING)
def test_each_rank_reads_its_own_slices_alone(workers, tmp_path, layout, kv_heads, family):
    path = write_tiny_hf(tmp_path, family=family, num_files=3, kv_heads=kv_heads)
    tensors = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    results = workers.run(layout.world_size, _count_bytes, str(path), layout)
    for counts, mine, num_bytes, finite in results:
        assert finite, "a parameter was left unloaded"
        assert num_bytes == sum(counts.values())
        assert set(counts) <= mine
        expected, found = {}, {}
        for name in mine:
            # With fewer key-value heads than ranks, only the three together are cut evenly.
            whole = re.sub("[qkv]_proj", "qkv_proj", name) if kv_heads < layout.tp else name
            share = 1 if "norm" in name else layout.tp
            if not name.startswith(("model.embed", "lm_head")):
                expected[whole] = expected.get(whole, 0) + tensors[name].nbytes // share
                found[whole] = found.get(whole, 0) + counts.get(name, 0)
        assert found == expected
    # Over all ranks: what is sharded once, norms once on each tensor-parallel rank.
    for name, tensor in tensors.items():
        copies = layout.tp if "norm" in name else 1
        assert sum(r[0].get(name, 0) for r in results) == copies * tensor.nbytes, name


def _load_dtype(path, dtype):
    loaded = load(path, Layout(), dtype=dtype)
    return {n: p.data for n, p in all_parameters(loaded.chunks)}


def test_vocabulary_padding_is_zero_and_types_are_cast(workers, tmp_path):
    path = write_tiny_hf(tmp_path)
    (got,) = workers.run(1, _load_dtype, str(path), "bfloat16")
    file = load_file(path / FILE)
    embedding = got["embedding.word_embeddings.weight"]
    assert embedding.shape == (320, 64) and embedding.dtype == torch.bfloat16
    assert torch.equal(embedding[:300], file["model.embed_tokens.weight"].bfloat16())
    assert not embedding[300:].any() and not got["output_layer.weight"][300:].any()


def test_weights_give_the_models_outputs(workers, tmp_path):
    # Names and layouts could be wrong in the same way in both directions; outputs could not.
    from transformers import Qwen2Model

    path = write_tiny_hf(tmp_path)
    ids = torch.arange(11)[None] * 7 % 300
    model = Qwen2Model.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(ids).last_hidden_state[0]
    for layout in (Layout(1, 1), Layout(2, 1)):
        for hidden in workers.run(layout.world_size, _hidden, str(path), layout, ids):
            assert (hidden - expected).abs().max() < 2e-5


def _hidden(path, layout, ids):
    return forward(load(path, layout).chunks[0], ids).reshape(ids.shape[1], -1)


# What is refused


def _problem(path, role="actor"):
    with pytest.raises(CheckpointError) as error:
        check_hf_tensors(HfReader(path), read_model_shape(path), role)
    return str(error.value)


V0 = "model.layers.0.self_attn.v_proj.weight"


def test_missing_unknown_misshapen_and_mistyped_tensors_are_named(tmp_path):
    path = write_tiny_hf(tmp_path)

    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(96, 64)
        tensors[V0] = torch.zeros(64, 64)
        tensors["lm_head.weight"] = torch.zeros(300, 64, dtype=torch.int64)

    rewrite(path, change)
    problem = _problem(path)
    assert "model.norm.weight is missing (expected shape [64])" in problem
    assert "model.layers.9.mlp.up_proj.weight is unknown" in problem
    # 2 key-value heads of 16 rows
    assert f"{V0}: expected shape [32, 64], found [64, 64]" in problem
    assert "lm_head.weight: expected F32 or BF16 or F16, found I64" in problem


OF_ANOTHER_FAMILY = {
    # tensors, config: the first problem named
    ("qwen2", "llama"): "model.layers.0.self_attn.q_proj.bias is unknown",
    ("qwen2", "qwen3"): "model.layers.0.self_attn.q_norm.weight is missing (expected shape [16])",
    ("qwen3", "llama"): "model.layers.0.self_attn.q_norm.weight is unknown",
    ("llama", "qwen2"): "model.layers.0.self_attn.q_proj.bias is missing (expected shape [64])",
}


@pytest.mark.parametrize("pair", OF_ANOTHER_FAMILY)
def test_weights_of_another_family_are_refused(tmp_path, pair):
    weights, config = (write_tiny_hf(tmp_path / name, family=name, num_layers=1) for name in pair)
    (config / FILE).write_bytes((weights / FILE).read_bytes())
    assert OF_ANOTHER_FAMILY[pair] in _problem(config)


def test_a_query_norm_over_all_heads_is_refused(tmp_path):
    """Some families normalise all heads together; Qwen3 each head of 16 alone."""
    path = write_tiny_hf(tmp_path, family="qwen3")
    name = "model.layers.1.self_attn.q_norm.weight"
    rewrite(path, lambda t: t.update({name: torch.ones(64)}))
    assert f"{name}: expected shape [16], found [64]" in _problem(path)


def test_a_reward_model_is_no_actor(tmp_path):
    path = write_tiny_hf(tmp_path)
    rewrite(path, lambda t: t.update({"score.weight": torch.zeros(1, 64)}))
    assert "score.weight is unknown" in _problem(path)


def _try_load(path, built_as, role="actor", layout=ONE):
    config = make_config(layout)
    ranks = groups.initialize(config.parallel)
    shape = read_model_shape(built_as)
    chunks = build_model(shape, config.model, config.parallel, ranks, role, seed=config.seed)
    before = [p.clone() for _, p in all_parameters(chunks)]
    try:
        load_hf_weights(chunks, shape, path, ranks, role)
    except CheckpointError as error:
        same = all(torch.equal(a, b) for a, (_, b) in zip(before, all_parameters(chunks)))
        return str(error), same
    return None, False


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_by_name(workers, tmp_path, value):
    """Part of query, key and value, which are one parameter."""
    path = write_tiny_hf(tmp_path)
    rewrite(path, lambda t: t[V0][3].fill_(value))
    ((problem, _),) = workers.run(1, _try_load, str(path), str(path))
    assert problem.startswith(f"{path}: {V0} has numbers that are not finite")
    (problem, _), (of_rank_1, _) = workers.run(2, _try_load_sharded, str(path))
    assert V0 in problem and of_rank_1 is None, "it has another key-value head"


def _try_load_sharded(path):
    return _try_load(path, path, layout=Layout(2, 1))


def test_nothing_is_copied_before_everything_fits(workers, tmp_path):
    good = write_tiny_hf(tmp_path / "good")
    bad = write_tiny_hf(tmp_path / "bad")
    # The last tensor of the file: everything before it would have been copied.
    rewrite(bad, lambda t: t.update({"lm_head.weight": torch.zeros(299, 64)}))
    ((problem, same),) = workers.run(1, _try_load, str(bad), str(good))
    assert "lm_head.weight: expected shape [300, 64], found [299, 64]" in problem
    assert same


def test_a_tied_model_whose_output_differs_is_refused(workers, tmp_path):
    path = write_tiny_hf(tmp_path, tied=True)
    rewrite(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    ((problem, _),) = workers.run(1, _try_load, str(path), str(path))
    assert problem is None
    rewrite(path, lambda t: t["lm_head.weight"][299, 63].add_(1))
    ((problem, same),) = workers.run(1, _try_load, str(path), str(path))
    assert "tie_word_embeddings=true, but lm_head.weight differs" in problem and same
    rewrite(path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].bfloat16()}))
    ((problem, same),) = workers.run(1, _try_load, str(path), str(path))
    assert "expected [300, 64] F32 as model.embed_tokens.weight, found [300, 64] BF16" in problem
    assert same


@pytest.mark.parametrize(
    "target",
    ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "a\\b.safetensors",
     "a\0b.safetensors", "model.bin", "..", "", 3, None],
)  # fmt: skip
def test_index_entries_that_leave_the_directory_are_refused(tmp_path, target):
    outside = write_tiny_hf(tmp_path)
    path = write_tiny_hf(tmp_path / "hf", num_files=2)
    (path / "sub").mkdir()
    (outside / FILE).rename(path / "sub" / FILE)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = target
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="model.norm.weight points to"):
        HfReader(path)


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", "not JSON", "[" * 100_000, '{"weight_map": 3}', '{"weight_map": null}'],
    ids=range(6),
)
def test_a_broken_index_is_refused(tmp_path, text):
    path = write_tiny_hf(tmp_path, num_files=2)
    (path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        HfReader(path)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="neither model.safetensors nor"):
        HfReader(tmp_path)
    path = write_tiny_hf(tmp_path, num_files=2)
    first, second = sorted(path.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    assert f"{second.name}: no tensor" in _problem(path)
    second.write_bytes(b"\xff" * 100)
    assert f"{second} cannot be read as safetensors" in _problem(path)
    second.unlink()
    assert f"{second} cannot be read as safetensors" in _problem(path)


def test_an_empty_slice_reads_nothing(tmp_path):
    reader = HfReader(write_tiny_hf(tmp_path, dtype=torch.bfloat16))
    part = reader.read("lm_head.weight", 0, 300, 300)
    assert part.shape == (0, 64) and part.dtype == torch.bfloat16 and reader.bytes_read == 0


def test_a_directory_of_links_is_read(tmp_path):
    # HF's own cache holds links into another directory.
    blobs = write_tiny_hf(tmp_path / "blobs", num_files=2)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    check_hf_tensors(HfReader(snapshot), read_model_shape(snapshot), "actor")


# Critics


def _critic(path, built_as, init_std):
    loaded = load(path, Layout(), "critic", built_as=built_as, value_head_init_std=init_std)
    return {n: p.data for n, p in all_parameters(loaded.chunks)}


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_from_a_policy_keeps_its_new_head(workers, tmp_path, tied):
    path = write_tiny_hf(tmp_path, tied=tied)
    (zero,) = workers.run(1, _critic, str(path), None, 0.0)
    (drawn,) = workers.run(1, _critic, str(path), None, 0.5)
    assert not zero["output_layer.weight"].any()
    # 64 draws of N(0, 0.25): the standard deviation's own standard error is 0.5 / sqrt(128) = 0.04
    assert abs(drawn["output_layer.weight"].std() - 0.5) < 0.2
    file = load_file(path / FILE)
    assert torch.equal(zero["decoder.final_layernorm.weight"], file["model.norm.weight"])
    assert "lm_head.weight" in file or tied


def test_a_critic_from_a_reward_model_takes_its_head(workers, tmp_path):
    path = write_tiny_hf(tmp_path)
    head = torch.randn(1, 64)

    def change(tensors):
        del tensors["lm_head.weight"]
        tensors.update({"score.weight": head, "score.bias": torch.zeros(1)})

    rewrite(path, change)
    (got,) = workers.run(1, _critic, str(path), None, 0.0)
    assert torch.equal(got["output_layer.weight"], head)
    assert got["output_layer.weight"].dtype == torch.float32


def test_a_reward_model_needs_its_label(tmp_path):
    path = write_tiny_reward_model(tmp_path / "scalar", bias=0.5)
    check_hf_tensors(HfReader(path), read_model_shape(path), "reward_model")
    other = write_tiny_hf(tmp_path / "policy")
    assert "score.weight is missing (expected shape [1, 64])" in _problem(other, "reward_model")
    check_hf_tensors(HfReader(other), read_model_shape(other), "critic")


def test_heads_with_more_labels_are_refused(tmp_path):
    path = write_tiny_hf(tmp_path)
    rewrite(path, lambda t: t.update({"score.weight": torch.zeros(2, 64)}))
    assert "score.weight: expected shape [1, 64], found [2, 64]" in _problem(path, "critic")

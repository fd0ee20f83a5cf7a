"""Converting checkpoints: exact there and back, and loaded by any layout.

Does not exercise: Transformer Engine's layers (their names are spelled out here), GPUs, large
files (test_convert_streams.py), several machines.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from tests.weights.convert.converted import assert_same, read, rewrite, to_hf, to_megatron
from tests.weights.loaded import Layout, all_parameters, forward, load
from tests.weights.tiny_hf import FAMILIES, write_tiny_hf
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel import groups
from vapo_megatron.weights.convert.sharded_files import ShardedReader
from vapo_megatron.weights.convert.sharded_tensors import EXTRA_STATES, sharded_tensors
from vapo_megatron.weights.export_hf import export_hf
from vapo_megatron.weights.hf_directory import exported_step

STOPS = [5, 7]
"""Other than the tiny model's own."""
CARRIED = ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja")

# There and back


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bit_identical(tmp_path, family, tied):
    # Two key-value heads: with TP 4 they are cut. A vocabulary of 300 is padded to 320, 384, 512.
    hf = write_tiny_hf(tmp_path / "hf", family=family, tied=tied, num_files=2, dtype=torch.bfloat16)
    for name in CARRIED:
        (hf / name).write_text(name)
    (hf / "run_me.py").write_text("no")
    layouts = [Layout(tp, pp) for tp in (1, 2, 4) for pp in (1, 2)] + [Layout(2, 2, 2)]
    for i, layout in enumerate(layouts):
        megatron, back = tmp_path / f"megatron{i}", tmp_path / f"back{i}"
        assert to_megatron(hf, megatron, layout) == 0 and to_hf(megatron, back) == 0
        assert_same(read(back), read(hf))
        files = {f"__{rank}_0.distcp" for rank in range(layout.world_size)}
        assert {f.name for f in megatron.glob("*.distcp")} == files
        rest = {"config.json", "generation_config.json", *CARRIED}
        assert {f.name for f in back.iterdir() if "safetensors" not in f.name} == rest
        for name in rest:
            assert (back / name).read_bytes() == (hf / name).read_bytes(), name


def test_types_may_differ_between_tensors_and_a_tied_output_is_kept(tmp_path):
    hf = write_tiny_hf(tmp_path / "hf", tied=True, dtype=torch.bfloat16)

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        for name in tensors:
            if "norm" in name:
                tensors[name] = tensors[name].float() + 1e-7
            elif "o_proj" in name:
                tensors[name] = tensors[name].half()

    rewrite(hf, change)
    assert to_megatron(hf, tmp_path / "m", Layout(2, 2)) == to_hf(tmp_path / "m", tmp_path / "b")
    assert_same(read(tmp_path / "b"), read(hf))


def test_blocks_are_put_together(tmp_path, monkeypatch):
    from vapo_megatron.weights import copying

    hf = write_tiny_hf(tmp_path / "hf", vocab=301)
    # 1,000 bytes are 3 rows of 64 columns or 2 of 96; nothing divides evenly.
    monkeypatch.setattr(copying, "BLOCK_BYTES", 1000)
    assert to_megatron(hf, tmp_path / "m", Layout(2, 1)) == to_hf(tmp_path / "m", tmp_path / "b")
    monkeypatch.undo()
    assert_same(read(tmp_path / "b"), read(hf))
    chunks = ShardedReader(tmp_path / "m").tensors["decoder.layers.mlp.linear_fc2.weight"].chunks
    # 64 rows in blocks of 2, two ranks, four layers.
    assert len(chunks) == 32 * 2 * 4


def convert_together(hf, megatron, back):
    assert to_megatron(hf, megatron, Layout(2, 1)) == 0
    from vapo_megatron.weights.convert.to_hf import convert_to_hf

    convert_to_hf(megatron, back, max_file_bytes=70_000)


def test_processes_share_the_work(workers, tmp_path):
    hf = write_tiny_hf(tmp_path / "hf")
    workers.run(2, convert_together, hf, tmp_path / "m", tmp_path / "b")
    assert_same(read(tmp_path / "b"), read(hf))
    metadata = pickle.loads((tmp_path / "m/.metadata").read_bytes())
    elements = {}
    for index, place in metadata.storage_data.items():
        for chunk in getattr(metadata.state_dict_metadata[index.fqn], "chunks", ()):
            if chunk.offsets == index.offset:
                count = elements.get(place.relative_path, 0) + chunk.sizes.numel()
                elements[place.relative_path] = count
    first, second = (elements[f"__0_{i}.distcp"] + elements[f"__1_{i}.distcp"] for i in (0, 1))
    # The least loaded gets the next tensor: loads differ by one tensor at most, the embedding.
    assert len(elements) == 4 and abs(first - second) <= 384 * 64


# In a model


def compare_loaded(hf, converted, layout, settings):
    expected = load(hf, layout, **settings)
    groups.destroy()
    found = load(converted, layout, **settings)
    pairs = zip(all_parameters(expected.chunks), all_parameters(found.chunks), strict=True)
    return all(torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in pairs)


LOADING = [
    # How it was converted, how it is loaded: the vocabulary is padded to 64 * TP each time.
    (Layout(2, 2), Layout(1, 1), False, {}),
    (Layout(1, 1), Layout(2, 2, 2), False, {}),
    (Layout(4, 1), Layout(2, 1), False, {}),
    (Layout(1, 2), Layout(4, 1), True, {}),
    (Layout(2, 1), Layout(1, 2), True, {}),
    (Layout(2, 2), Layout(2, 1), False, {"dtype": "bfloat16"}),
]


def drop_extra_states(directory):
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    for key in [k for k in metadata.state_dict_metadata if "_extra_state" in k]:
        del metadata.state_dict_metadata[key]
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(("written", "layout", "tied", "settings"), LOADING, ids=str)
def test_any_layout_loads_it(workers, tmp_path, written, layout, tied, settings):
    hf = write_tiny_hf(tmp_path / "hf", tied=tied)
    assert to_megatron(hf, tmp_path / "m", written) == 0
    if tied:  # Transformer Engine's layers have other extra states; none is requested.
        drop_extra_states(tmp_path / "m")
    arguments = (str(hf), str(tmp_path / "m"), layout, settings)
    assert all(workers.run(layout.world_size, compare_loaded, *arguments))


def test_each_stage_has_its_own_layers_in_its_files(tmp_path):
    hf = write_tiny_hf(tmp_path / "hf")
    for layout, expected in ((Layout(2, 2), [0, 0, 1, 1]), (Layout(2, 2, 2), [0, 1, 0, 1])):
        out = tmp_path / f"m{layout.vpp}"
        assert to_megatron(hf, out, layout) == 0
        metadata = pickle.loads((out / ".metadata").read_bytes())
        for index, place in metadata.storage_data.items():
            stage, rank = divmod(int(place.relative_path.split("_")[2]), 2)
            if index.fqn.endswith("linear_fc2.weight"):
                assert (stage, rank) == (expected[index.offset[0]], index.offset[2] // 48)
            elif index.fqn.endswith("linear_fc1.weight"):  # 96 gate rows, then 96 up rows
                assert rank == index.offset[1] % 96 // 48
            elif index.fqn.startswith("embedding"):
                assert stage == 0
            elif index.fqn.startswith(("decoder.final", "output")):
                assert stage == 1


def own_state(hf, layout, role):
    state = {}
    for chunk in load(hf, layout, role).chunks:
        for value in chunk.sharded_state_dict().values():
            for part in value.build() if hasattr(value, "build") else [value]:
                name = getattr(part, "unique_key", part.key)
                state[name if "_extra_state" in name else part.key] = tuple(part.global_shape)
    return state


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_names_and_shapes_are_the_models_own(workers, tmp_path, family):
    """Layers without Transformer Engine, whose norms are modules of their own, give these names."""
    hf = write_tiny_hf(tmp_path / "hf", family=family)
    for role in ("actor", "critic"):
        assert to_megatron(hf, tmp_path / role, Layout(2, 1), "--role", role) == 0
        states = workers.run(2, own_state, str(hf), Layout(2, 1), role)
        own = {name: shape for state in states for name, shape in state.items()}
        reader = ShardedReader(tmp_path / role)
        assert {key: reader.shape(key) for key in reader.tensors} == {
            name: shape for name, shape in own.items() if "_extra_state" not in name
        }
        extra = {f"{key}/shard_{i}_4" for key in EXTRA_STATES for i in range(4)}
        assert {name for name in own if "_extra_state" in name} <= extra
        metadata = pickle.loads((tmp_path / role / ".metadata").read_bytes())
        assert extra < set(metadata.state_dict_metadata)


def test_names_are_those_of_transformer_engines_layers(tmp_path):
    shape = read_model_shape(write_tiny_hf(tmp_path, family="qwen3"))
    layer = "decoder.layers."
    assert {t.key for t in sharded_tensors(shape, "actor", 320)} == {
        "embedding.word_embeddings.weight",
        layer + "self_attention.linear_qkv.layer_norm_weight",
        layer + "self_attention.linear_qkv.weight",
        layer + "self_attention.q_layernorm.weight",
        layer + "self_attention.k_layernorm.weight",
        layer + "self_attention.linear_proj.weight",
        layer + "mlp.linear_fc1.layer_norm_weight",
        layer + "mlp.linear_fc1.weight",
        layer + "mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }


def save_run(hf, out, layout, role):
    from vapo_megatron.parallel.optimizer import build_ddp, build_optimizer
    from vapo_megatron.parallel.sharded_state import load_sharded
    from vapo_megatron.run.checkpoint.writer import CheckpointWriter

    loaded = load(hf, layout, role, value_head_init_std=0.3)
    chunks = build_ddp(loaded.chunks, loaded.config.parallel, loaded.chunks[0].config)
    optimizer = build_optimizer(chunks, loaded.config.optimizer, role)
    placed = SimpleNamespace(
        model=loaded.chunks,
        chunks=chunks,
        optimizer=optimizer,
        held=lambda part: contextlib.nullcontext(),
    )
    model = SimpleNamespace(num_updates=0, placed=placed)
    changed = threading.Event()
    with CheckpointWriter(out, loaded.config.checkpoint) as writer:
        writer._thread.submit(changed.wait, 100)
        writer.save(1, {role: model}, {"stop_token_ids": STOPS})
        head = getattr(loaded.chunks[-1], "output_layer", None)
        if role == "critic" and head is not None:
            head.bias.zero_()
        changed.set()
    load_sharded(loaded.chunks, optimizer, out / "step_000001" / role)
    export_hf(
        loaded.chunks, loaded.shape, loaded.ranks, out / "export", hf, role=role, step=1,
        stop_token_ids=STOPS,
    )  # fmt: skip


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_runs_checkpoint_becomes_its_export(workers, tmp_path, capsys, role):
    """Its chunks are whole shards, beside optimizer state."""
    hf, out = tmp_path / "hf", tmp_path / role
    out.mkdir()
    if role == "actor":
        write_tiny_hf(hf)
    else:
        reward_model(hf, "Token", 0.5)
    workers.run(4, save_run, str(hf), out, Layout(2, 2), role)
    saved = out / "step_000001" / role
    assert to_hf(saved, tmp_path / "b") == 2
    assert "no config.json" in capsys.readouterr().err
    assert to_hf(saved, tmp_path / "b", "--hf", hf) == 0
    assert_same(read(tmp_path / "b"), read(out / "export"))
    assert_same(read(tmp_path / "b"), read(hf))
    assert (tmp_path / "b/config.json").read_text() == (out / "export/config.json").read_text()
    assert exported_step(tmp_path / "b") == exported_step(out / "export") == 1
    assert exported_step(hf) is None
    settings = "generation_config.json"
    if role == "actor":
        assert (tmp_path / "b" / settings).read_bytes() == (out / "export" / settings).read_bytes()
        found = GenerationConfig.from_pretrained(tmp_path / "b")
        assert (found.eos_token_id, found.bos_token_id) == (STOPS, 1)
    else:
        assert not (tmp_path / "b" / settings).exists()


# Critics


def reward_model(path, head, bias, **sizes):
    """Write what transformers saves of a random model with one label; returns its class."""
    import transformers

    write_tiny_hf(path, **sizes)
    kind = getattr(transformers, f"Qwen2For{head}Classification")
    model = kind.from_pretrained(path, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        model.score.weight.normal_()
        if head == "Token":
            model.score.bias.fill_(bias)
    shutil.rmtree(path)
    model.save_pretrained(path)
    return kind


def values_of(path, layout, ids, out):
    loaded = load(path, layout, "critic")
    export_hf(loaded.chunks, loaded.shape, loaded.ranks, out, path, role="critic")
    return forward(loaded.chunks[0], ids).reshape(-1), loaded.num_bytes


@pytest.mark.parametrize(("head", "bias"), [("Sequence", 0.0), ("Token", 0.5), ("Token", 0.0)])
def test_a_reward_model_becomes_a_critic_and_back(workers, tmp_path, head, bias):
    hf, megatron, back = tmp_path / "hf", tmp_path / "m", tmp_path / "b"
    kind = reward_model(hf, head, bias)
    assert to_megatron(hf, megatron, Layout(2, 1), "--role", "critic") == 0
    assert to_hf(megatron, back) == 0
    assert_same(read(back), read(hf))
    assert (back / "config.json").read_bytes() == (hf / "config.json").read_bytes()
    ids = torch.arange(12)[None] * 5
    scores = []
    for path in (hf, back):
        model, report = kind.from_pretrained(path, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        scores.append(model.eval()(ids).logits.detach().flatten())
    assert torch.equal(*scores)
    # transformers' sequence classification gives the last position's score alone.
    for path in (hf, megatron):
        export = tmp_path / "export"
        ((values, num_bytes),) = workers.run(1, values_of, str(path), Layout(), ids, export)
        assert_same(read(export), read(hf))
        assert (export / "config.json").read_bytes() == (hf / "config.json").read_bytes()
        assert (values[-len(scores[0]) :] - scores[0]).abs().max() < 1e-5
        assert values.abs().max() > 0.5 and num_bytes > 0


def critic_parameters(path, layout, std):
    loaded = load(path, layout, "critic", value_head_init_std=std)
    return dict(all_parameters(loaded.chunks))


def test_a_critic_from_a_policy_has_a_new_head(workers, tmp_path):
    hf = write_tiny_hf(tmp_path / "hf")
    head = {}
    for std in (0.0, 0.5):
        out = tmp_path / f"m{std}"
        assert to_megatron(hf, out, Layout(), "--role", "critic", "--value-head-init-std", std) == 0
        ((from_hf, from_megatron),) = zip(
            *(workers.run(1, critic_parameters, str(p), Layout(), std) for p in (hf, out))
        )
        assert from_hf.keys() == from_megatron.keys()
        assert all(torch.equal(from_hf[n], from_megatron[n]) for n in from_hf)
        head[std] = from_megatron["output_layer.weight"]
    assert not head[0.0].any() and head[0.5].std() > 0.3
    assert to_hf(tmp_path / "m0.5", tmp_path / "b") == 0
    from transformers import Qwen2ForTokenClassification

    model = Qwen2ForTokenClassification.from_pretrained(tmp_path / "b")
    assert torch.equal(model.score.weight.data, head[0.5]) and not model.score.bias.any()


def test_a_critic_from_an_actors_checkpoint_leaves_its_output_alone(workers, tmp_path):
    hf = write_tiny_hf(tmp_path / "hf")
    assert to_megatron(hf, tmp_path / "m", Layout(2, 1)) == 0
    (found,) = workers.run(1, critic_parameters, str(tmp_path / "m"), Layout(), 0.5)
    (expected,) = workers.run(1, critic_parameters, str(hf), Layout(), 0.5)
    assert all(torch.equal(found[name], expected[name]) for name in expected)

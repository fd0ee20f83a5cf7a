"""Exports: bit-identical to what was loaded, loadable by transformers, complete or not there.

Does not exercise: several nodes, files of several GB, GPUs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.weights.loaded import FEW_HEADS, Layout, forward, load, widen
from tests.weights.tiny_hf import write_tiny_hf
from vapo_megatron.config import VapoConfig
from vapo_megatron.errors import CheckpointError
from vapo_megatron.training import loop
from vapo_megatron.weights import export_hf as writer
from vapo_megatron.weights.export_hf import export_hf

LAYOUTS = [
    Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(2, 2), Layout(1, 2, 2), Layout(tp=2, cp=2)
]  # fmt: skip


def _read(path):
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        part = load_file(file)
        assert not tensors.keys() & part.keys()
        tensors |= part
    return tensors


def _same(a, b):
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a
    )


def _export(path, layout, out, kwargs):
    loaded = load(path, layout, dtype=kwargs.pop("dtype", "float32"))
    export_hf(loaded.chunks, loaded.shape, loaded.ranks, out, path, **kwargs)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_there_and_back_is_bit_identical(workers, tmp_path, layout, tied):
    path, out = write_tiny_hf(tmp_path / "hf", tied=tied, num_files=2), tmp_path / "a" / "out"
    workers.run(layout.world_size, _export, str(path), layout, str(out), {})
    assert _same(_read(out), _read(path))
    assert [p.name for p in out.parent.iterdir()] == ["out"]
    files = sorted(p.name for p in out.glob("*.safetensors"))
    if layout.pp == 1:
        assert files == ["model.safetensors"]
    else:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert files == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        assert index["weight_map"].keys() == _read(out).keys()
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in _read(out).values())


@pytest.mark.parametrize(("layout", "kv_heads"), FEW_HEADS, ids=str)
def test_fewer_key_value_heads_than_ranks_are_bit_identical(workers, tmp_path, layout, kv_heads):
    path, out = write_tiny_hf(tmp_path / "hf", kv_heads=kv_heads), tmp_path / "out"
    workers.run(layout.world_size, _export, str(path), layout, str(out), {})
    assert _same(_read(out), _read(path))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_other_families_there_and_back(workers, tmp_path, family, tied):
    from transformers import AutoModelForCausalLM

    sizes = {"family": family, "tied": tied, "head_dim": 32, "num_layers": 2}
    path, out = write_tiny_hf(tmp_path / "hf", **sizes), tmp_path / "out"
    layout = Layout(2, 1) if tied else Layout(2, 2)
    workers.run(layout.world_size, _export, str(path), layout, str(out), {})
    assert _same(_read(out), _read(path))
    # Everything that config.json says stays, the rope scaling and "Qwen3ForCausalLM" too.
    config = json.loads((out / "config.json").read_text())
    assert config == json.loads((path / "config.json").read_text())
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(model).__name__ == family.capitalize() + "ForCausalLM"
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_files_are_bounded_and_transformers_loads_them(workers, tmp_path):
    from transformers import Qwen2ForCausalLM

    path, out = write_tiny_hf(tmp_path / "hf"), tmp_path / "out"
    for name in ("tokenizer.json", "merges.txt", "run_me.py"):
        (path / name).write_text(name)
    # The embedding and the output matrix, 300 * 64 * 4 = 76,800 bytes each, exceed the limit alone.
    options = {"max_file_bytes": 70_000}
    workers.run(4, _export, str(path), Layout(2, 2), str(out), options)
    data = [sum(t.nbytes for t in load_file(f).values()) for f in out.glob("*.safetensors")]
    assert sorted(data)[-2:] == [76_800, 76_800] and sorted(data)[-3] <= 70_000
    models, ids = [], torch.arange(12)[None]
    for directory in (path, out):
        model, report = Qwen2ForCausalLM.from_pretrained(directory, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        models.append(model(ids).logits)
    assert torch.equal(*models)
    assert json.loads((out / "config.json").read_text()) == json.loads(
        (path / "config.json").read_text()
    )
    carried = {"generation_config.json", "tokenizer.json", "merges.txt"}
    rest = {p.name for p in out.iterdir() if p.suffix != ".safetensors"}
    assert rest == carried | {"config.json", "model.safetensors.index.json"}
    assert all((out / n).read_text() == (path / n).read_text() for n in carried)


@pytest.mark.parametrize(("sampled", "configured"), [([5, 7], []), ([5], [9]), ([], [9])], ids=str)
def test_a_run_exports_its_stop_tokens(monkeypatch, tmp_path, sampled, configured):
    """Of a replay, which knows no tokenizer, those that it was given."""
    given = {}
    monkeypatch.setattr(loop, "export_hf", lambda *_, **options: given.update(options))
    phase = contextlib.nullcontext
    config = VapoConfig.model_validate({"rollout": {"stop_token_ids": configured}})
    run = SimpleNamespace(
        config=config, run_dir=tmp_path, _models=("actor",), _snapshot=(3, {}), shape=None,
        actor=SimpleNamespace(placed=SimpleNamespace(chunks=())), ranks=SimpleNamespace(rank=1),
        source=SimpleNamespace(stop_token_ids=sampled), output=SimpleNamespace(note=len),
        watchdog=SimpleNamespace(phase=phase), device_schedule=phase,
    )  # fmt: skip
    loop.VapoTrainer._finish(run)
    assert (given["stop_token_ids"], given["step"]) == (sampled or configured, 3)


def test_bfloat16_is_exported_as_trained(workers, tmp_path):
    path, out = write_tiny_hf(tmp_path / "hf"), tmp_path / "out"
    workers.run(1, _export, str(path), Layout(), str(out), {"dtype": "bfloat16"})
    assert _same(_read(out), {n: t.bfloat16() for n, t in _read(path).items()})
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


# Critics


def _export_critic(path, layout, out, ids, dtype):
    loaded = load(path, layout, "critic", dtype=dtype, value_head_init_std=0.3)
    widen(loaded.chunks, "output_layer.weight")
    export_hf(loaded.chunks, loaded.shape, loaded.ranks, out, path, role="critic")
    if layout != Layout():
        return None
    return forward(loaded.chunks[0], ids).reshape(-1)


def _reload_critic(out, layout, again):
    loaded = load(out, layout, "critic")
    export_hf(loaded.chunks, loaded.shape, loaded.ranks, again, out, role="critic")


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_critic_gives_the_same_values_in_transformers(workers, tmp_path, family):
    from transformers import AutoModelForTokenClassification

    path, out = write_tiny_hf(tmp_path / "hf", family=family, tied=True), tmp_path / "out"
    ids = torch.arange(12)[None] * 5
    (values,) = workers.run(1, _export_critic, str(path), Layout(), str(out), ids, "float32")
    model, report = AutoModelForTokenClassification.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    # vLLM and older transformers choose the class by this name.
    (architecture,) = json.loads((out / "config.json").read_text())["architectures"]
    assert architecture == type(model).__name__ == family.capitalize() + "ForTokenClassification"
    # In train mode on purpose: the exported config must switch transformers' default dropout off.
    logits = model.train()(ids).logits
    assert logits.shape == (1, 12, 1)
    assert values.abs().max() > 0.1
    assert (logits[0, :, 0] - values).abs().max() < 1e-5
    for layout in (Layout(2, 1), Layout(1, 2)):
        again = tmp_path / f"again{layout.tp}"
        workers.run(layout.world_size, _reload_critic, str(out), layout, str(again))
        assert _same(_read(again), _read(out))


def test_a_float32_head_on_a_bfloat16_model_is_kept(workers, tmp_path):
    path, out = (
        write_tiny_hf(tmp_path / "hf", vocab=301, hidden=66, heads=6, kv_heads=2),
        tmp_path / "out",
    )
    ids = torch.arange(12)[None]
    workers.run(2, _export_critic, str(path), Layout(1, 2), str(out), ids, "bfloat16")
    dtypes = {n: t.dtype for n, t in _read(out).items()}
    assert dtypes.pop("score.weight") == dtypes.pop("score.bias") == torch.float32
    assert set(dtypes.values()) == {torch.bfloat16}


# Complete or not there at all


def _try_export(path, layout, out, broken_rank=None):
    loaded = load(path, layout)
    original = writer.write_safetensors

    def failing(file, tensors, data):
        next(data)
        raise OSError(28, "No space left on device")

    if loaded.ranks.rank == broken_rank:
        writer.write_safetensors = failing
    try:
        export_hf(loaded.chunks, loaded.shape, loaded.ranks, out, path)
    except CheckpointError as error:
        return str(error)
    finally:
        writer.write_safetensors = original
    return None


def _export_and_sync(path, out):
    """Names of the files that were on disk when the export got its name."""
    synced, named, fsync, rename = set(), [], os.fsync, Path.rename

    def fsync_noted(file):
        synced.add(os.readlink(f"/proc/self/fd/{file}").split("/")[-1])
        fsync(file)

    def rename_noted(source, target):
        named.append((target.name, set(synced)))
        return rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync_noted)
        patch.setattr(Path, "rename", rename_noted)
        _export(path, Layout(), out, {})
    return dict(named)[Path(out).name]


def test_an_earlier_export_is_replaced_and_nothing_else(workers, tmp_path):
    path, other = write_tiny_hf(tmp_path / "hf"), write_tiny_hf(tmp_path / "other", seed=1)
    out = tmp_path / "out"
    for source in (other, path):
        (synced,) = workers.run(1, _export_and_sync, str(source), str(out))
        assert _same(_read(out), _read(source))
        assert synced == {".out.partial", *(file.name for file in out.iterdir())}
    keep = tmp_path / "keep"
    keep.mkdir()
    (keep / "thesis.txt").write_text("mine")
    for target in (keep, other, tmp_path / "hf" / "config.json"):
        problems = workers.run(2, _try_export, str(path), Layout(2, 1), str(target))
        assert all("is not an earlier export" in p for p in problems)
    assert (keep / "thesis.txt").read_text() == "mine" and other.is_dir()
    for target in (path, tmp_path):
        (problem,) = workers.run(1, _try_export, str(path), Layout(), str(target))
        assert "the directory to copy from" in problem
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "keep", "other", "out"]


@pytest.mark.parametrize("broken_rank", [0, 2])
def test_a_full_disk_on_one_leader_is_told_on_every_rank(workers, tmp_path, broken_rank):
    # TP2 x PP2: rank 0 leads the first stage, rank 2 the second.
    path, out = write_tiny_hf(tmp_path / "hf"), tmp_path / "out"
    problems = workers.run(4, _try_export, str(path), Layout(2, 2), str(out), broken_rank)
    why = rf"HF export: {out} cannot be written: No space left on device \(it takes 0.0\S+ GB, "
    assert all(re.match(why, problem) for problem in problems)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_parent_that_cannot_be_made_is_told_on_every_rank(workers, tmp_path):
    path = write_tiny_hf(tmp_path / "hf")
    out = path / "config.json" / "out"
    problems = workers.run(2, _try_export, str(path), Layout(2, 1), str(out))
    assert all("Not a directory" in p for p in problems)

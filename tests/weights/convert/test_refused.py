"""Conversions that are refused or interrupted: one line of error, and no output directory.

Does not exercise: several processes of which one fails.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.run.checkpoint.test_writer import limited, small_disk
from tests.weights.convert.converted import assert_same, read, rewrite, to_hf, to_megatron
from tests.weights.loaded import Layout
from tests.weights.tiny_hf import write_tiny_hf

ROOT = Path(__file__).resolve().parents[3]

V0 = "model.layers.0.self_attn.v_proj.weight"
BROKEN = {
    "missing": (
        lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing (expected shape [64])"),
    "unknown": (lambda t: t.update(x=torch.ones(1)), "x is unknown"),
    "shape": (lambda t: t.update({V0: torch.ones(64, 64)}),
              f"{V0}: expected shape [32, 64], found [64, 64]"),
    "type": (lambda t: t.update({V0: t[V0].int()}),
             f"{V0}: expected F32 or BF16 or F16, found I32"),
    "mixed": (lambda t: t.update({V0: t[V0].half()}),
              f"{V0}: expected F32 as model.layers.0.self_attn.q_proj.weight"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_directory_is_refused_before_anything_is_written(tmp_path, capsys, kind):
    change, message = BROKEN[kind]
    hf = write_tiny_hf(tmp_path / "hf")
    rewrite(hf, change)
    assert to_megatron(hf, tmp_path / "m") == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_smaller_vocabulary_than_the_checkpoints_is_refused(tmp_path, capsys):
    """Its padding would hide that rows are left out."""
    hf, other = write_tiny_hf(tmp_path / "hf", vocab=300), write_tiny_hf(tmp_path / "b", vocab=64)
    assert to_megatron(hf, tmp_path / "m") == 0
    capsys.readouterr()
    assert to_hf(tmp_path / "m", tmp_path / "out", "--hf", other) == 2
    error = capsys.readouterr().err
    assert "b has vocab_size=64, but " in error and "was converted with 300; give the" in error
    assert len(error.splitlines()) == 1 and not (tmp_path / "out").exists()
    assert to_hf(tmp_path / "m", tmp_path / "out", "--hf", hf) == 0


def test_a_tied_model_with_an_output_of_its_own_is_refused(tmp_path, capsys):
    hf = write_tiny_hf(tmp_path / "hf", tied=True)
    rewrite(hf, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1e-6}))
    assert to_megatron(hf, tmp_path / "m") == 2
    assert "tie_word_embeddings=true, but lm_head.weight differs" in capsys.readouterr().err


def test_layouts_and_index_entries_that_cannot_be_are_refused(tmp_path, capsys):
    hf = write_tiny_hf(tmp_path / "hf", num_files=2)
    assert to_megatron(hf, tmp_path / "m", Layout(3, 1)) == 2
    assert "tensor_model_parallel_size=3 must divide" in capsys.readouterr().err
    index = hf / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../model.safetensors"
    index.write_text(json.dumps(content))
    assert to_megatron(hf, tmp_path / "m") == 2
    assert "model.norm.weight points to '../model.safetensors'" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


class _Evil:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


def _without(key):
    def change(metadata):
        del metadata.state_dict_metadata[key]

    return change


def _add_unknown(metadata):
    tensors = metadata.state_dict_metadata
    tensors["decoder.x"] = tensors["decoder.final_layernorm.weight"]


def _move(metadata):
    for place in metadata.storage_data.values():
        place.relative_path = "../m/" + place.relative_path


def _drop_chunk(metadata):
    metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"].chunks.pop()


def _retype(metadata):
    tensor = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
    tensor.properties.dtype = torch.float16


def _shift(metadata):
    for index, place in metadata.storage_data.items():
        if index.fqn == "decoder.final_layernorm.weight":
            place.offset -= 1


FC1 = "decoder.layers.mlp.linear_fc1.weight"
BROKEN_CHECKPOINTS = {
    "missing": (_without(FC1), f"{FC1} is missing (expected shape [4, 192, 64])"),
    "unknown": (_add_unknown, "decoder.x is unknown"),
    "outside": (_move, "must be in a file of the same directory"),
    "incomplete": (_drop_chunk, f"{FC1}: expected 49152 elements in its chunks, found 46080"),
    "pickle": (lambda m: setattr(m, "planner_data", _Evil()), "it names posix.mkdir"),
    "type": (_retype, "expected [64] torch.float16, found [64] torch.float32"),
    "shifted": (_shift, "decoder.final_layernorm.weight at [0] cannot be read"),
}


@pytest.mark.parametrize("kind", BROKEN_CHECKPOINTS)
def test_a_broken_checkpoint_is_refused(tmp_path, monkeypatch, capsys, kind):
    change, message = BROKEN_CHECKPOINTS[kind]
    monkeypatch.chdir(tmp_path)
    assert to_megatron(write_tiny_hf(tmp_path / "hf"), tmp_path / "m", Layout(2, 1)) == 0
    file = tmp_path / "m/.metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))
    capsys.readouterr()
    assert to_hf(tmp_path / "m", tmp_path / "b") == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m"]


def test_files_that_are_cut_off_or_not_there_are_named(tmp_path, capsys):
    hf, megatron = write_tiny_hf(tmp_path / "hf"), tmp_path / "m"
    assert to_megatron(hf, megatron, Layout(2, 1)) == 0
    file = megatron / "__1_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    assert to_hf(megatron, tmp_path / "b") == 2
    assert f"{file}: expected at least" in capsys.readouterr().err
    file.unlink()
    assert to_hf(megatron, tmp_path / "b") == 2
    assert "no such file" in capsys.readouterr().err
    assert to_hf(hf, tmp_path / "b") == 2
    assert "not a megatron-core distributed checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("text", [b'{"tied_output": tr', b"[]", b'{"caf\xe9": 1}'])
def test_a_damaged_note_of_the_conversion_is_named(tmp_path, capsys, text):
    megatron = tmp_path / "m"
    assert to_megatron(write_tiny_hf(tmp_path / "hf"), megatron) == 0
    (megatron / "conversion.json").write_bytes(text)
    capsys.readouterr()
    assert to_hf(megatron, tmp_path / "b") == 2
    error = capsys.readouterr().err
    assert f"{megatron}/conversion.json" in error and "convert the checkpoint again" in error
    assert error.count("\n") == 1 and not (tmp_path / "b").exists()


# Whole or not at all


def test_what_is_there_already_stays(tmp_path, capsys):
    hf, other = write_tiny_hf(tmp_path / "hf"), write_tiny_hf(tmp_path / "other", seed=1)
    megatron, back = tmp_path / "m", tmp_path / "b"
    assert to_megatron(other, megatron) == 0 and to_hf(megatron, back) == 0
    for again in (lambda *o: to_megatron(hf, megatron, Layout(), *o),
                  lambda *o: to_hf(megatron, back, *o)):  # fmt: skip
        assert again() == 2
        assert "exists; give another directory, or --overwrite" in capsys.readouterr().err
        assert again("--overwrite") == 0
    assert_same(read(back), read(hf))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("mine")
    assert to_hf(megatron, tmp_path / "mine", "--overwrite") == 2
    assert (tmp_path / "mine/thesis.txt").read_text() == "mine"
    assert to_hf(megatron, megatron, "--overwrite") == 2 and megatron.is_dir()


@pytest.mark.parametrize(
    ("ending", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_an_interrupt_leaves_nothing_that_looks_whole(tmp_path, ending, code):
    hf, megatron = write_tiny_hf(tmp_path / "hf", num_layers=100), tmp_path / "m"
    command = [sys.executable, "tools/convert_hf_to_megatron.py", "--hf", str(hf), "--out",
               str(megatron), "--tensor-model-parallel-size", "4"]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for _ in itertools.count():
        if list(tmp_path.glob(".m.partial/__3_0.distcp")) or process.poll() is not None:
            break
        time.sleep(0.01)
    process.send_signal(ending)
    _, error = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in error, error
    assert not megatron.exists()
    assert (tmp_path / ".m.partial").exists() == (ending == signal.SIGKILL)
    if ending == signal.SIGKILL:
        assert to_megatron(hf, megatron, Layout(4, 1)) == 0
        assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "m"]
        assert to_hf(megatron, tmp_path / "b") == 0
        assert_same(read(tmp_path / "b"), read(hf))


FULL = {"to-megatron": to_megatron, "to-hf": to_hf}


@pytest.mark.parametrize("direction", FULL)
def test_no_room_is_one_line_and_leaves_nothing(tmp_path, capsys, direction):
    """A limit meets torch.save's records, copied rows, and a file's last bytes."""
    given, disk = write_tiny_hf(tmp_path / "hf"), tmp_path / "disk"
    if direction == "to-hf":
        assert to_megatron(tmp_path / "hf", tmp_path / "m") == 0
        given = tmp_path / "m"
    disk.mkdir()
    assert FULL[direction](given, disk / "out") == 0
    largest = max(file.stat().st_size for file in (disk / "out").iterdir())
    shutil.rmtree(disk / "out")
    capsys.readouterr()

    def told():
        assert FULL[direction](given, disk / "out") == 2
        assert not any(disk.iterdir())
        (line,) = capsys.readouterr().err.splitlines()
        return line

    for limit in (1, 1000, 5000, largest // 2, largest - 1):
        with limited(limit):
            said = told()
        assert f"{disk}/out cannot be written: {os.strerror(errno.EFBIG)} (it takes 0.0006" in said
        assert "; raise the limit on a file's size (ulimit -f) and start again" in said
    with small_disk(disk, 400 << 10) as cannot_mount:
        if not cannot_mount:
            said = told()
            assert f"{disk}/out cannot be written: {os.strerror(errno.ENOSPC)} (it takes" in said
            assert said.endswith(" GB, 0.00041 GB are free); free some space and start again")

"""Converting a checkpoint of Qwen2.5-32B's shape, cut to two layers (5.1 GB): memory and speed.

And of Qwen3-235B-A22B's, whose memory has two parts: a block of rows at a time, which is as large
in one layer (7.5 GB) as in all, and what is known of each of its 36,000 tensors, which is as much
in narrow layers.

    bash tests/run.sh tests/weights/convert/test_streams.py -m slow -s

prints seconds, cp's seconds for the same bytes on the same disk, their ratio, and the peak of
resident memory of the one process that converts, its imports included. Both wait for the disk; how
long cp takes to fill the page cache alone is printed too. They take turns, five times, for a
machine that shares its disk and its memory copies 5 GB now in 2 s and now in 9; the medians count.
Needs 16 GB of disk under --basetemp. Does not exercise several processes, nor real weights.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.weights.hf_directory import TensorPlan, write_index, write_safetensors
from vapo_megatron.weights.hf_reader import HfReader
from vapo_megatron.weights.table import hf_tensors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
ROOT = Path(__file__).resolve().parents[3]
MAX_MEGABYTES, MIN_RATIO = 2500, 0.4


QWEN2_5 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16",
    "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 2,
    "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "hidden_act": "silu", "tie_word_embeddings": False, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": True,
}  # fmt: skip
PARTS = {
    "one layer": {"num_hidden_layers": 1},
    "narrow layers": {
        "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16,
        "vocab_size": 512, "moe_intermediate_size": 16,
    },
}  # fmt: skip


def write_large(directory: Path, config: dict) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    names = hf_tensors(read_model_shape(directory), "actor")
    plans = [TensorPlan(name, size, torch.bfloat16) for name, size in names.items()]
    noise = torch.randint(0, 256, (8_000_003,), dtype=torch.uint8)
    files = {f"model-{i + 1:05d}-of-00004.safetensors": plans[i::4] for i in range(4)}
    for file, some in files.items():
        write_safetensors(directory / file, some, pieces(some, noise))
    write_index(directory, files)


def pieces(plans, noise):
    """Random bytes that differ from piece to piece."""
    for plan in plans:
        left = plan.num_bytes
        for turn in itertools.count(1):
            piece = noise.roll(turn)[: min(left, 8_000_000)].clone().view(plan.dtype)
            yield piece
            left -= piece.nbytes
            if not left:
                break


# A small process: a program's peak begins as that of the process which starts it, and the test maps
# whole checkpoints.
MEASURED = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_maxrss)
sys.exit(status != 0)
"""


def timed(*command: str | Path) -> tuple[float, float, float]:
    """Return seconds, those until all is on the disk, and the peak of memory in megabytes."""
    os.sync()
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-S", "-c", MEASURED, *map(str, command)], cwd=ROOT, check=True,
        capture_output=True,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    os.sync()
    return seconds, time.perf_counter() - started, int(done.stdout) * 1024 / 1e6


def test_memory_and_speed(tmp_path):
    hf, megatron, back = tmp_path / "hf", tmp_path / "megatron", tmp_path / "back"
    write_large(hf, QWEN2_5)
    size = sum(f.stat().st_size for f in hf.iterdir())
    assert size >= 4e9
    forth = ["tools/convert_hf_to_megatron.py", "--hf", hf, "--out", megatron]
    forth += ["--tensor-model-parallel-size", 8, "--pipeline-model-parallel-size", 2]
    home = ["tools/convert_megatron_to_hf.py", "--megatron", megatron, "--out", back]
    ratios = []
    for name, source, out, command in (
        ("HF to TP 8 x PP 2", hf, megatron, forth),
        ("back to HF", megatron, back, home),
    ):
        copies, conversions = [], []
        for turn in range(5):
            copies.append(timed("cp", "-r", source, tmp_path / "copy"))
            shutil.rmtree(tmp_path / "copy")
            if turn:
                shutil.rmtree(out)
            conversions.append(timed(sys.executable, *command))
        (cache, copying, _), (seconds, waited, peak) = (
            map(statistics.median, zip(*runs)) for runs in (copies, conversions)
        )
        ratios.append(copying / waited)
        print(
            f"\n{name}: {size / 1e9:.2f} GB in {seconds:.1f} s, {waited:.1f} s on the disk; cp "
            f"{cache:.1f} s, {copying:.1f} s on the disk; {ratios[-1]:.2f} of cp's speed, "
            f"{cache / seconds:.2f} without waiting; peak {peak:,.0f} MB\n"
            f"  cp {[round(c[0], 1) for c in copies]} {[round(c[1], 1) for c in copies]}\n"
            f"  conversion {[round(c[0], 1) for c in conversions]} "
            f"{[round(c[1], 1) for c in conversions]}"
        )
        assert max(c[2] for c in conversions) < MAX_MEGABYTES
    assert_equal(hf, back)
    assert min(ratios) >= MIN_RATIO


def assert_equal(one: Path, other: Path) -> None:
    first, second = HfReader(one), HfReader(other)
    assert first.names() and set(first.names()) == set(second.names())
    for name in first.names():
        for start in range(0, first.shape(name)[0], 4096):
            stop = min(start + 4096, first.shape(name)[0])
            parts = [r.read(name, 0, start, stop).view(torch.uint8) for r in (first, second)]
            assert torch.equal(*parts), name


def test_memory_of_a_mixture(tmp_path):
    peaks = {}
    *_, peaks["nothing"] = timed(sys.executable, "tools/convert_hf_to_megatron.py", "--help")
    for part, changes in PARTS.items():
        hf, megatron, back = (tmp_path / part / name for name in ("hf", "megatron", "back"))
        hf.parent.mkdir()
        write_large(hf, {**QWEN3_235B, **changes})
        for name, command in {
            "forth": [
                "tools/convert_hf_to_megatron.py", "--hf", hf, "--out", megatron,
                "--expert-model-parallel-size", 8, "--tensor-model-parallel-size", 4,
            ],
            "back": ["tools/convert_megatron_to_hf.py", "--megatron", megatron, "--out", back],
        }.items():  # fmt: skip
            seconds, _, peak = timed(sys.executable, *command)
            size = sum(file.stat().st_size for file in hf.iterdir())
            peaks[part, name] = peak
            print(f"\n{part}, {name}: {size / 1e9:.2f} GB in {seconds:.0f} s, peak {peak:,.0f} MB")
        assert_equal(hf, back)
        shutil.rmtree(hf.parent)
    for name in ("forth", "back"):
        # Of the whole: what a layer needs, and what all tensors need beside what each process does.
        whole = sum(peaks[part, name] for part in PARTS) - peaks["nothing"]
        print(f"all of it, {name}: {whole:,.0f} MB")
        assert whole < MAX_MEGABYTES

"""tools/plan.py: what it prints, and what it refuses. The figures' own tests are in weights/."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.models.qwen25 import config_json

PATH = Path(__file__).resolve().parent.parent / "tools" / "plan.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("plan_tool", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ONE_STAGE = ["--tp", "4", "--pp", "1", "--vllm-tp", "4"]
LAYOUT = ["--tp", "8", "--pp", "4", "--vllm-tp", "8"]


def test_reshard_prints_bytes_and_seconds(tool, capsys):
    assert tool.main(["reshard", "--model", "Qwen2.5-32B", *LAYOUT]) == 0
    head, layout, _, columns, *lines = capsys.readouterr().out.splitlines()
    assert head == "Qwen2.5-32B: 32.76e9 parameters in bfloat16, 16 nodes x 8 GPUs"
    assert layout.startswith(
        "trainer TP 8 x PP 4 (VPP 1) x DP 4 -> 16 vLLM replicas of TP 8; planned in "
    )
    assert columns.split()[-6:] == ["GPU", "same", "node", "across", "nodes", "seconds"]
    means = {line[:16].strip(): line[36:].split() for line in lines if "received, mean" in line}
    # A rank lacks three quarters of its eighth of 65.5 GB; gathering, every other rank's shard too.
    assert means["plan"][2] == "6.143" and means["full gather"][1:3] == ["57.354", "6.145"]
    assert float(means["plan"][3]) < 0.5 * float(means["full gather"][3])


def test_each_rank_and_a_directory(tool, capsys, tmp_path):
    config = {"model_type": "qwen2", **config_json("0.5B")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--tp", "2", "--pp", "2", "--vllm-tp", "1", "--nodes", "1", "--gpus-per-node", "4"]
    assert tool.main(["reshard", "--model", str(tmp_path), *options, "--per-rank"]) == 0
    out = capsys.readouterr().out
    assert "0.49e9 parameters" in out and out.count("rank 3: sent") == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "Qwen9", *LAYOUT], "model 'Qwen9' must be one of Qwen2.5-0.5B"),
        (["--model", "Qwen2.5-0.5B", *LAYOUT], "must divide the model's num_attention_heads=14"),
        (["--model", "Qwen2.5-32B", *LAYOUT, "--nodes", "3"], "multiple of --tp=8 * --pp=4"),
        (["--model", "Qwen2.5-32B", *LAYOUT[:4], "--vllm-tp", "3"], "rollout.tensor_model"),
        (["--model", "Qwen2.5-7B", *ONE_STAGE, "--vpp", "2"], "--vpp=2 must be 1 with --pp=1"),
    ],
)
def test_a_mistake_is_one_line(tool, capsys, options, message):
    assert tool.main(["reshard", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("plan: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0"], "argument --nodes: 0 must be at least 1"),
        (["--network", "0"], "argument --network: 0.0 must be more than 0"),
    ],
)
def test_a_number_that_cannot_be(tool, capsys, options, message):
    with pytest.raises(SystemExit) as error:
        tool.main(["reshard", "--model", "Qwen2.5-32B", *LAYOUT, *options])
    assert error.value.code == 2 and message in capsys.readouterr().err

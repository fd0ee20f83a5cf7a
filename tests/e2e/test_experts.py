"""Whole runs of a tiny mixture of experts: two processes share its experts, trained and sampled.

What the steps compute is held elsewhere (tests/distributed/test_experts.py, test_other_layouts.py);
here vLLM samples, weights are synced and compared, and routes are replayed, through the command
that users start. Minutes:

    bash tests/run.sh tests/e2e/test_experts.py -m slow
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.rollout.tiny_tokenizer import ANSWERS, write_tiny_tokenizer
from tests.weights.tiny_hf import write_tiny_hf
from tests.whole_run import lines, write_problems

ROOT = Path(__file__).resolve().parents[2]
COMMON = [
    "parallel.sequence_parallel=true", "parallel.expert_model_parallel_size=2",
    "parallel.use_distributed_optimizer=true", "algorithm.router_replay=r2",
    "algorithm.responses_per_step=32", "algorithm.mini_batch_size=16",
    "algorithm.value_pretraining_steps=1", "rollout.max_response_tokens=32",
    "rollout.verify_sync_every=1", "optimizer.actor_learning_rate=1e-2", "checkpoint.every_steps=2",
    "evaluation.every_steps=2",
]  # fmt: skip
TOGETHER = ["rollout.tensor_model_parallel_size=2", "rollout.expert_parallel=true"]
APART = [
    "rollout.placement=disaggregated", "rollout.num_processes=1", "rollout.lag=1",
    "rollout.max_logprob_difference=null",
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    sizes = dict(num_layers=2, hidden=64, heads=2, kv_heads=2, ffn=96, vocab=64, head_dim=32)
    hf = write_tiny_hf(root / "hf", family="qwen3_moe", **sizes)
    write_tiny_tokenizer(hf, 64, last=ANSWERS)
    write_problems(root / "train.jsonl", range(40))
    write_problems(root / "test.jsonl", range(8))
    return root


def train(inputs, run_dir, steps, *overrides):
    """Train for so many policy steps; return the rows, by step."""
    command = [
        sys.executable, "-m", "vapo_megatron", "train", "--config", "examples/configs/tiny.yaml",
        f"model.hf_path={inputs}/hf", f"data.train_path={inputs}/train.jsonl",
        f"evaluation.path={inputs}/test.jsonl", f"logging.run_dir={run_dir}",
        f"algorithm.policy_steps={steps}", *COMMON, *overrides,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {row["step"]: row for row in lines(run_dir / "metrics.jsonl")}


def lasting(row):
    """What of a row does not depend on the machine."""
    rooms = ("actor/", "critic/", "algorithm/", "reward/", "rollout/length", "evaluation/")
    return {name: value for name, value in row.items() if name.startswith(rooms)}


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """(Run directory, its rows): sampled and trained by the same processes."""
    run_dir = tmp_path_factory.mktemp("together") / "whole"
    return run_dir, train(inputs, run_dir, 3, *TOGETHER)


@pytest.mark.slow
def test_sampler_trainer_and_update_agree(whole):
    for step in (2, 3, 4):
        row = whole[1][step]
        assert 0 < row["rollout/logprob_diff_max"] < 1e-4, "sampler and trainer"
        assert row["actor/first_ratio_diff_max"] < 1e-6, "the update and the pass before it"
        assert 0 < row["actor/other_routes_fraction"] < 0.9


@pytest.mark.slow
def test_a_run_goes_on_and_exports_alike(whole, inputs, tmp_path):
    from transformers import AutoModelForCausalLM

    train(inputs, tmp_path / "again", 1, *TOGETHER)
    again = train(inputs, tmp_path / "again", 3, *TOGETHER)
    for step in (3, 4):
        assert lasting(again[step]) == lasting(whole[1][step])
    models = [
        AutoModelForCausalLM.from_pretrained(run_dir / "hf_export", output_loading_info=True)
        for run_dir in (whole[0], tmp_path / "again")
    ]
    for _, report in models:
        assert not report["missing_keys"] and not report["unexpected_keys"]
    first, second = (dict(model.named_parameters()) for model, _ in models)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    config = json.loads((whole[0] / "hf_export/config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]


@pytest.mark.slow
def test_processes_of_their_own_sample_one_step_behind(inputs, tmp_path):
    first, second = (train(inputs, tmp_path / name, 2, *APART) for name in ("one", "two"))
    for step in (2, 3):
        assert lasting(first[step]) == lasting(second[step]), "asynchronous runs replay bit for bit"
        assert first[step]["actor/first_ratio_diff_max"] < 1e-6

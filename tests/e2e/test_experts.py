"""Whole runs of a tiny mixture of experts: two processes share its experts, trained and sampled.

What the steps compute is held elsewhere (tests/distributed/test_experts.py, test_other_layouts.py);
here vLLM samples, weights are synced and compared, and routes are replayed, through the command
that users start. Minutes:

    bash tests/run.sh tests/e2e/test_experts.py -m slow
"""

import json
import os
import signal
import subprocess
import sys
import time
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
# In float32 the sampler's routes are the trainer's own, and replaying them would show nothing.
SAMPLERS = [
    "algorithm.router_replay=r3", "rollout.compare_routes_every=1", "rollout.dtype=bfloat16",
    "rollout.max_logprob_difference=null",
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


def command(inputs, run_dir, steps, *overrides):
    """A run of so many policy steps."""
    return [
        sys.executable, "-m", "vapo_megatron", "train", "--config", "examples/configs/tiny.yaml",
        f"model.hf_path={inputs}/hf", f"data.train_path={inputs}/train.jsonl",
        f"evaluation.path={inputs}/test.jsonl", f"logging.run_dir={run_dir}",
        f"algorithm.policy_steps={steps}", *COMMON, *overrides,
    ]  # fmt: skip


def run(words):
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def train(inputs, run_dir, steps, *overrides):
    """Train for so many policy steps; return the rows, by step."""
    run(command(inputs, run_dir, steps, *overrides))
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


# The sampler's routes


@pytest.fixture(scope="module")
def sampled(inputs, tmp_path_factory):
    """(Run directory, its rows), with vLLM's routes replayed in the trainer."""
    run_dir = tmp_path_factory.mktemp("sampled") / "whole"
    return run_dir, train(inputs, run_dir, 3, *TOGETHER, *SAMPLERS, "logging.dump_steps=4")


@pytest.mark.slow
def test_the_trainer_goes_where_the_sampler_went(sampled):
    for step in (2, 3, 4):
        row = sampled[1][step]
        assert 0 < row["rollout/other_routes_fraction"] < 0.1
        difference = row["rollout/logprob_diff_mean"]
        assert 0 < difference < row["rollout/logprob_diff_own_routes_mean"] < 0.05
        assert row["actor/first_ratio_diff_max"] < 1e-6, "the update and the pass before it"
        assert 0 < row["actor/other_routes_fraction"] < 0.9


@pytest.mark.slow
def test_a_dump_has_the_routes(sampled, inputs, tmp_path):
    given = command(inputs, tmp_path / "again", 3, *TOGETHER, *SAMPLERS)
    run([*given, "--replay", str(sampled[0])])
    again = {row["step"]: row for row in lines(tmp_path / "again/metrics.jsonl")}
    for step in (2, 3, 4):
        for name, value in sampled[1][step].items():
            if name.startswith(("actor/", "critic/", "algorithm/", "rollout/other_routes")):
                assert again[step][name] == value, name


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_bits(sampled, inputs, tmp_path):
    given = command(
        inputs, tmp_path / "killed", 3, *TOGETHER, *SAMPLERS, "logging.dump_steps=4",
        "checkpoint.every_steps=1",
    )  # fmt: skip
    metrics = tmp_path / "killed/metrics.jsonl"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            given, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 300
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
            assert process.poll() is None and time.monotonic() < deadline, (
                tmp_path / "log"
            ).read_text()[-3000:]
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    run(given)
    again = {row["step"]: row for row in lines(metrics)}
    for step in (3, 4):
        assert lasting(again[step]) == lasting(sampled[1][step])


@pytest.mark.slow
def test_groups_that_go_on_over_steps_one_step_behind(inputs, tmp_path):
    more = [*APART, *SAMPLERS, "rollout.carry_over_groups=2", "rollout.max_lag=2"]
    first, second = (train(inputs, tmp_path / name, 2, *more) for name in ("one", "two"))
    for step in (2, 3):
        assert lasting(first[step]) == lasting(second[step]), "asynchronous runs replay bit for bit"
        assert first[step]["actor/first_ratio_diff_max"] < 1e-6
    assert first[3]["rollout/lag_max"] > 0


@pytest.mark.slow
def test_what_was_trained_is_evaluated_alike(whole, inputs, tmp_path):
    """By one process and by two that share the experts."""
    found = []
    for size in (1, 2):
        out = tmp_path / f"by_{size}.jsonl"
        run([
            sys.executable, "-m", "vapo_megatron", "evaluate", "--checkpoint",
            str(whole[0] / "hf_export"), "--data", f"{inputs}/test.jsonl", "--out", str(out),
            "--samples", "2", "--nproc", str(size), "model.dtype=float32",
            "rollout.max_prompt_tokens=16", "rollout.max_response_tokens=24",
            "rollout.kv_cache_bytes=16777216", "reward.num_workers=1",
            f"rollout.tensor_model_parallel_size={size}",
            f"rollout.expert_parallel={str(size > 1).lower()}",
        ])  # fmt: skip
        _, *rows = map(json.loads, out.read_text().splitlines())
        found.append([[(r["text"], r["status"]) for r in row["responses"]] for row in rows])
    assert len(found[0]) == 8 and found[0] == found[1]

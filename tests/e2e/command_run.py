"""Small whole runs through the commands that users start: what they get, and what lasts of them."""

import sys

from tests import jsonl
from tests.e2e.test_run import run
from tests.whole_run import write_inputs

# vLLM on a CPU takes heads of 32.
MODEL = dict(num_layers=2, hidden=64, heads=2, kv_heads=2, ffn=96, vocab=64, head_dim=32)
COMMON = [
    "parallel.sequence_parallel=true", "parallel.use_distributed_optimizer=true",
    "algorithm.responses_per_step=32", "algorithm.mini_batch_size=16",
    "algorithm.value_pretraining_steps=1", "rollout.max_response_tokens=32",
    "rollout.verify_sync_every=1", "optimizer.actor_learning_rate=1e-2", "checkpoint.every_steps=2",
    "evaluation.every_steps=2",
]  # fmt: skip


def make_inputs(root, family):
    """A model of a family and problems, in a directory."""
    write_inputs(root, {**MODEL, "family": family}, train=40, test=8)
    return root


def command(inputs, run_dir, steps, *overrides):
    """A run of so many policy steps."""
    return [
        sys.executable, "-m", "vapo_megatron", "train", "--config", "examples/configs/tiny.yaml",
        f"model.hf_path={inputs}/hf", f"data.train_path={inputs}/train.jsonl",
        f"evaluation.path={inputs}/test.jsonl", f"logging.run_dir={run_dir}",
        f"algorithm.policy_steps={steps}", *COMMON, *overrides,
    ]  # fmt: skip


def train(inputs, run_dir, steps, *overrides):
    """Train for so many policy steps; return the rows, by step."""
    run(command(inputs, run_dir, steps, *overrides), timeout=500)
    return {row["step"]: row for row in jsonl.read(run_dir / "metrics.jsonl")}


def lasting(row):
    """What of a row does not depend on the machine."""
    rooms = ("actor/", "critic/", "algorithm/", "reward/", "rollout/response_length", "evaluation/")
    return {name: value for name, value in row.items() if name.startswith(rooms)}


def evaluate(inputs, run_dir, out, *more):
    """Sample the held-out problems twice with what a run has exported; return the lines."""
    words = [sys.executable, "-m", "vapo_megatron", "evaluate", "--samples", "2"]
    words += ["--checkpoint", run_dir / "hf_export", "--data", inputs / "test.jsonl", "--out", out]
    words += ["model.dtype=float32", "rollout.max_prompt_tokens=16", "reward.num_workers=1"]
    words += ["rollout.max_response_tokens=24", "rollout.kv_cache_bytes=16777216"]
    run([*words, *more], timeout=500)
    _, *lines = jsonl.read(out)
    return lines

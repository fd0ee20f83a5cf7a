"""Whole runs in real processes: torchrun, megatron-core, vLLM, the verifier, files on disk.

A barely trained base model of the tiny task, two processes; sequence parallelism, recomputation and
the distributed optimizer as in the 32B recipe. The run from beginning to end is by turns, and vLLM
loses what a GPU would lose (tests/rollout/vllm/poisoned_sleep.py). Does not show that it learns
(examples/run_vapo_tiny.sh does), nor anything else about a GPU.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests import jsonl
from tests.e2e.greedy_run import train_and_answer
from tests.launched import SECRET, Done, Launched
from tests.slurm_stand_in import Cluster
from tests.whole_run import measured
from tests.workers import free_port
from vapo_megatron.cli.train import main

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "examples/configs/tiny.yaml"
RECIPE = ROOT / "examples/run_vapo_qwen32b.sh"
# What `RECIPE --config TINY` reads.
RECIPE_CONFIGS = [
    ROOT / "examples/configs/qwen2.5_base.yaml",
    ROOT / "examples/configs/qwen2.5_32b.yaml",
    TINY,
]
SMALL = [
    "algorithm.value_pretraining_steps=1",
    "algorithm.policy_steps=3",
    "algorithm.responses_per_step=32",
    "algorithm.group_size=8",
    "algorithm.mini_batch_size=16",
    "rollout.max_response_tokens=64",
    "parallel.max_tokens_per_microbatch=512",
    "evaluation.samples=2",
]
# What the 32B recipe sets for 128 GPUs, or for long responses. Sequence parallelism, recomputation
# and overlap stay as it has them.
ON_TWO = [
    "parallel.pipeline_model_parallel_size=1",
    "parallel.virtual_pipeline_model_parallel_size=null",
    "parallel.use_distributed_optimizer=true",
    "rollout.tensor_model_parallel_size=1",
    "reward.overlong_buffer_tokens=16",
]


def environment():
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    gone = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    clean = {k: v for k, v in os.environ.items() if k not in gone}
    return {**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "VAPO_PYTHON": sys.executable}


def torchrun(*arguments):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [*start, *map(str, arguments)]


def run(command, code=0, timeout=280, **more):
    """Run a command that must end with this code, or any (None), with more variables."""
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env={**environment(), **more}, capture_output=True,
        text=True, timeout=timeout,
    )  # fmt: skip
    assert code in (None, done.returncode), f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def make_base(out, iterations, experts=0):
    """A base model of so many iterations."""
    sys.path.insert(0, "examples/tiny")
    import make_base_model

    make_base_model.make(out, make_base_model.Recipe(iterations=iterations, experts=experts))
    return 0


def base_model(out, iterations, experts=0):
    """Make a base model; the override that names it."""
    ended(Launched(make_base, out, iterations, experts))
    return f"model.hf_path={out}"


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    """A base model of 30 iterations and some problems, as overrides."""
    out = tmp_path_factory.mktemp("tiny")
    return [*SMALL, base_model(out / "base", 30), *tiny_problems(out)]


def tiny_problems(out, train=200, test=24):
    """Make problems of the tiny task; the overrides that name them."""
    sizes = ("--train", train, "--test", test, "--seed", 0)
    run([sys.executable, "examples/tiny/task.py", "--out", out / "data", *sizes])
    return [f"data.train_path={out}/data/train.jsonl", f"evaluation.path={out}/data/test.jsonl"]


def ended(launched):
    """Wait for a run that must succeed."""
    done = launched.wait()
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


DYNAMIC = ["algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_max_rounds=3"]


class Straight(NamedTuple):
    out: Path
    done: Done
    overrides: list[str]


@pytest.fixture(
    scope="module",
    params=[[], pytest.param(DYNAMIC, marks=pytest.mark.slow)],
    ids=["vapo", "dynamic_sampling"],
)
def straight(request, launch, overrides, tmp_path_factory):
    """A run from beginning to end, and its engine's greedy answers afterwards."""
    out = tmp_path_factory.mktemp("straight")
    overrides = [*overrides, *ON_TWO, "rollout.max_response_tokens=32", *request.param]
    if request.param:
        # After 100 iterations some of its answers are right, so that some groups are mixed.
        overrides.append(base_model(out / "base", 100))
    logging = [f"logging.run_dir={out}/run", "logging.dump_steps=4"]
    given = [str(out / "greedy.json"), "3", *map(str, RECIPE_CONFIGS), *overrides, *logging]
    # By turns, as on GPUs; the runs below that repeat it leave everything where it is.
    given.append("parallel.offload=true")
    return Straight(out, ended(launch(train_and_answer, *given, world_size=2)), overrides)


def test_files_and_metrics(straight):
    run_dir, done = straight.out / "run", straight.done
    written = measured(run_dir)
    assert [r["step"] for r in written] == [0, 1, 2, 3, 4]
    assert "evaluation/avg@2" in written[0] and "evaluation/avg@2" in written[-1]
    assert "actor/loss" not in written[1], "the actor is fixed during value pretraining"
    for row in written[1:]:
        assert row["rollout/logprob_diff_max"] < 1e-4
    for row in written[2:]:
        assert row["actor/first_ratio_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0
    assert "step 4/4" in done.stdout
    for name in ("config.yaml", "report.html", "checkpoints/latest", "rollouts/step_000002.jsonl"):
        assert (run_dir / name).stat().st_size > 0, name
    assert list((run_dir / "tensorboard").iterdir())
    problems = jsonl.read(run_dir / "problems.jsonl")
    for row, went in zip(written[1:], problems, strict=True):
        assert went["step"] == row["step"] and went["group_size"] == 8
        assert sum(went["correct"]) == round(32 * row["reward/correct_fraction"])
        correct = dict(zip(went["problems"], went["correct"], strict=True))
        kept = (run_dir / "rollouts" / f"step_{row['step']:06d}.jsonl").read_text().splitlines()
        for group in map(json.loads, kept):
            right = sum(r["status"] == "correct" for r in group["responses"])
            assert correct[group["prompt_index"]] == right
    held_out = jsonl.read(run_dir / "held_out.jsonl")
    for row, went in zip((written[0], written[-1]), held_out, strict=True):
        assert (went["step"], went["group_size"]) == (row["step"], 2)
        assert went["problems"] == list(range(24))
        assert sum(went["correct"]) == round(2 * 24 * row["evaluation/avg@2"])
    rounds = [row.get("rollout/sampling_rounds") for row in written]
    if DYNAMIC[0] in straight.overrides:
        assert rounds[:2] == [None, None], "value pretraining takes what comes"
        assert max(rounds[2:]) > 1, "this run shows no refilled step; choose another seed"
        for row in written[2:]:
            dropped = [v for name, v in row.items() if name.startswith("rollout/groups_dropped")]
            # 32 responses in groups of 8.
            assert row["rollout/groups_sampled"] == 4 + sum(dropped)
            # Without the groups that are all wrong a larger share is right.
            assert row["reward/correct_fraction"] > row["rollout/sampled_correct_fraction"] > 0
    else:
        assert rounds == [None] * 5


def test_a_secret_in_the_environment_is_written_nowhere(straight):
    files = [path for path in straight.out.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert SECRET not in straight.done.stdout + straight.done.stderr


def test_no_host_is_asked_for_but_this_one(straight):
    for rank in (0, 1):
        hosts = json.loads((straight.out / f"greedy.json.{rank}.hosts").read_text())
        here = {"127.0.0.1", "localhost", "::1", socket.gethostname()}
        assert set(hosts) - here == {"would.be.seen"}


def test_the_export_gives_the_trained_engines_answers(straight):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    out = straight.out
    model = AutoModelForCausalLM.from_pretrained(out / "run/hf_export", dtype=torch.float32)
    answers = {}
    for rank in (0, 1):
        answers |= json.loads((out / f"greedy.json.{rank}").read_text())
    assert len(answers) == 16
    for prompt, expected in answers.values():
        generated = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=32, pad_token_id=0
        )
        assert generated[0, len(prompt) :].tolist() == expected
    started_from = [o.split("=")[1] for o in straight.overrides if "hf_path" in o][-1]
    base = load_file(Path(started_from) / "model.safetensors")
    moved = {k: (v - base[k]).abs().max() for k, v in model.state_dict().items() if k in base}
    assert min(moved.values()) > 0, "every tensor has been trained"


def texts(file):
    """A step's groups without what is told of each token."""
    groups = jsonl.read(file)
    for group in groups:
        for response in group["responses"]:
            response.pop("tokens", None)
    return groups


@pytest.mark.slow
def test_a_replay_started_by_the_recipe_repeats_the_run_bit_by_bit(straight, tmp_path):
    """Under torchrun, whose processes share no hash seed with each other nor with the run's."""
    original, again = straight.out / "run", tmp_path / "again"
    done = run(
        [
            "bash", RECIPE, "--config", TINY, *straight.overrides, "--replay", original,
            "data.train_path=null", f"logging.run_dir={again}",
        ],
        NPROC_PER_NODE="2", MASTER_PORT=str(free_port()),
    )  # fmt: skip
    config = (again / "config.yaml").read_text()
    assert "sequence_parallel: true" in config and "recompute: full" in config
    assert "step 4/4" in done.stdout
    first, *expected = measured(original)
    assert all(name == "step" or name.startswith("evaluation/") for name in first)
    for row in expected:
        # A replay neither samples nor evaluates nor feeds a sampler.
        absent = ("evaluation/", "sync/", "rollout/groups_", "rollout/sampl")
        for name in [name for name in row if name.startswith(absent)]:
            del row[name]
    assert measured(again)[1:] == expected
    # Parameters and optimizers of both roles after four steps.
    names = [p.relative_to(original) for p in original.glob("checkpoints/step_*/*/*.distcp")]
    assert len(names) >= 4
    for name in [*names, "hf_export/model.safetensors"]:
        assert (again / name).read_bytes() == (original / name).read_bytes(), name
    # The text for people, but for the tokens: a replay has no tokenizer.
    shown = [p.relative_to(original) for p in original.glob("rollouts/*.jsonl")]
    assert len(shown) == 4
    for name in shown:
        assert texts(again / name) == texts(original / name), name
    assert (again / "problems.jsonl").read_text() == (original / "problems.jsonl").read_text()


@pytest.mark.slow
def test_a_killed_run_goes_on(launch, straight, tmp_path):
    run_dir = tmp_path / "run"
    given = [part for file in RECIPE_CONFIGS for part in ("--config", str(file))]
    given += [*straight.overrides, f"logging.run_dir={run_dir}", "checkpoint.every_steps=1"]
    process = launch(main, given, world_size=2)
    metrics, latest = run_dir / "metrics.jsonl", run_dir / "checkpoints/latest"
    deadline = time.monotonic() + 200
    while not (latest.exists() and len(metrics.read_text().splitlines()) >= 3):
        assert process.is_running() and time.monotonic() < deadline, "no third row came"
        time.sleep(0.02)
    process.kill()
    # The row of step 2 was written; its checkpoint is perhaps still on its way to the disk.
    assert latest.read_text() in ("step_000001", "step_000002", "step_000003")
    done = ended(launch(main, given, world_size=2))
    assert "resumed" in done.stdout
    assert measured(run_dir) == measured(straight.out / "run"), "as if it had never been killed"
    again = ended(launch(main, given, world_size=2))
    assert "step 4/4" not in again.stdout, "a finished run has nothing left to do"


ONE_STEP = "algorithm.policy_steps=1"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["bash", "torchrun"])
def test_the_32b_recipe_starts_both_ways(way, overrides, tmp_path):
    arguments = [
        "--config", TINY, *overrides, *ON_TWO, ONE_STEP, f"logging.run_dir={tmp_path}/run",
        "rollout.tensor_model_parallel_size=" + ("2" if way == "bash" else "1"),
    ]  # fmt: skip
    if way == "bash":
        port = {"NPROC_PER_NODE": "2", "MASTER_PORT": str(free_port())}
        run(["bash", RECIPE, *arguments], **port)
    else:
        run(torchrun(RECIPE, *arguments))
    config = (tmp_path / "run/config.yaml").read_text()
    assert "sequence_parallel: true" in config and "recompute: full" in config
    written = measured(tmp_path / "run")
    assert [r["step"] for r in written] == [0, 1, 2]
    assert written[-1]["rollout/logprob_diff_max"] < 1e-4
    assert (tmp_path / "run/hf_export/model.safetensors").exists()


@pytest.mark.slow
def test_the_05b_recipe_trains_in_one_process(overrides, tmp_path):
    one = ["parallel.world_size=1", "parallel.tensor_model_parallel_size=1"]
    arguments = ["--config", TINY, *overrides, *ON_TWO, ONE_STEP, *one]
    recipe = ROOT / "examples/run_vapo_qwen0.5b.sh"
    arguments.append(f"logging.run_dir={tmp_path}/run")
    run(["bash", recipe, *arguments], MASTER_PORT=str(free_port()))
    assert [r["step"] for r in measured(tmp_path / "run")] == [0, 1, 2]


@pytest.mark.slow
def test_two_nodes_train_under_slurm(overrides, tmp_path):
    """One process on each. Signalled, the job is queued again; its second turn does the rest."""
    cluster, metrics = Cluster(tmp_path), tmp_path / "run/metrics.jsonl"
    arguments = [
        "--config", TINY, *overrides, *ON_TWO, ONE_STEP, f"logging.run_dir={tmp_path}/run",
        "rollout.tensor_model_parallel_size=2", "checkpoint.every_steps=1",
    ]  # fmt: skip
    job = cluster.submit(*arguments, VAPO_STOP_SECONDS="200")
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text()):
        assert job.poll() is None and time.monotonic() < deadline, cluster.log(0)[-3000:]
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=250) == 0, cluster.log(0)[-3000:]
    assert cluster.requeued
    assert [r["step"] for r in measured(tmp_path / "run")] == [0, 1], "it stops after its step"
    assert "stopped by SIGUSR1 after step 1" in cluster.log(0)
    assert cluster.submit(*arguments).wait(timeout=250) == 0, cluster.log(0)[-3000:]
    assert [r["step"] for r in measured(tmp_path / "run")] == [0, 1, 2]
    assert "step 2/2" in cluster.log(0) and "error" not in cluster.log(1)


@pytest.mark.slow
def test_an_answer_that_cannot_be_read_is_named_before_the_run(overrides, tmp_path):
    problems = tmp_path / "bad.jsonl"
    rows = [{"prompt": "Qa1b+1=", "answer": a} for a in ("2", "3", "???", "4")]
    jsonl.write(problems, rows)
    code = "import sys; from vapo_megatron.cli.train import main; c = main(); "
    code += "assert 'vllm' not in sys.modules, 'seconds were lost'; sys.exit(c)"
    more = ["parallel.world_size=1", "parallel.tensor_model_parallel_size=1"]
    more += [f"data.train_path={problems}", f"logging.run_dir={tmp_path}/run"]
    done = run([sys.executable, "-c", code, "--config", TINY, *overrides, *more], code=2)
    assert "row 2" in done.stderr and "'???'" in done.stderr
    assert "Traceback" not in done.stderr

"""`vapo train` and the recipes: what they resolve to, how they start, and what a mistake prints.

torchrun is real where it is named so; elsewhere a stand-in prints the command line and the state
that it would have been started with, or the command stops in this process before it. Does not
train: tests/e2e/test_run.py starts the 32B recipe both ways.
"""

import json
import math
import os
import runpy
import signal
import socket
import sys
from types import SimpleNamespace

import pytest
import yaml
from torch.distributed import run

import vapo_megatron
from tests.cli.starting import ROOT, make_stand_in, start
from tests.models.qwen25 import config_json
from tests.rollout.tiny_tokenizer import write_tiny_tokenizer
from tests.workers import free_port
from vapo_megatron.cli import train
from vapo_megatron.cli.main import main
from vapo_megatron.cli.torchrun import MODULE, torchrun_command
from vapo_megatron.config import ConfigError, VapoConfig, load_config
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel.health.early_stop import SIGNALS
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.weights.table import hf_tensors

CONFIGS = ROOT / "examples/configs"
BASE = CONFIGS / "qwen2.5_base.yaml"
SIZES = {"32b": ("32B", "16 nodes of 8 H100"), "7b": ("7B", "one node of 8 H100")}
SIZES |= {"0.5b": ("0.5B", "one GPU of 80 GB")}


def recipe(size):
    return ROOT / f"examples/run_vapo_qwen{size}.sh"


def overlay(size):
    return CONFIGS / f"qwen2.5_{size}.yaml"


# --- what the recipes are -------------------------------------------------------------------------

# The 32B recipe as it resolves. Source: VAPO (arXiv 2504.05118) where it prints the value, DAPO
# (arXiv 2503.14476, the same team) where it is silent, ours where neither says.
RECIPE_32B = [
    ("algorithm.responses_per_step", 8192, "VAPO: 512 prompts x 16 responses"),
    ("algorithm.group_size", 16, "VAPO: 16 responses to a prompt"),
    ("algorithm.mini_batch_size", 512, "VAPO: mini-batch 512; DAPO: of responses, 16 updates"),
    ("algorithm.value_pretraining_steps", 50, "VAPO: critic warm-up of 50 steps"),
    ("algorithm.advantage_estimator", "gae", "VAPO"),
    ("algorithm.lambda_critic", 1.0, "VAPO: decoupled GAE"),
    ("algorithm.lambda_actor", "adaptive", "VAPO: 1 - 1/(alpha l)"),
    ("algorithm.length_adaptive_alpha", 0.05, "VAPO"),
    ("algorithm.gamma", 1.0, "VAPO"),
    ("algorithm.clip_low", 0.2, "VAPO: clip-higher"),
    ("algorithm.clip_high", 0.28, "VAPO: clip-higher"),
    ("algorithm.loss_aggregation", "token", "VAPO: token-level loss"),
    ("algorithm.positive_lm_coef", 0.1, "VAPO: mu"),
    ("algorithm.advantage_whitening", False, "ours: VAPO is silent"),
    ("algorithm.kl_coef", 0.0, "DAPO: no KL"),
    ("algorithm.critic_updates_per_step", 1, "ours: VAPO is silent"),
    ("optimizer.actor_learning_rate", 1e-6, "VAPO"),
    ("optimizer.critic_learning_rate", 2e-6, "VAPO"),
    ("optimizer.actor_clip_grad", 1.0, "ours: neither says"),
    ("optimizer.critic_clip_grad", 1.0, "as the actor's"),
    ("optimizer.actor_warmup_updates", 320, "VAPO: then constant; DAPO: 20 rollouts of 16 updates"),
    ("optimizer.critic_warmup_updates", 320, "as the actor's"),
    ("rollout.max_prompt_tokens", 2048, "ours: neither says"),
    ("rollout.max_response_tokens", 20480, "DAPO"),
    ("rollout.temperature", 1.0, "ours: neither says"),
    ("rollout.top_p", 1.0, "ours: the distribution that the ratio is of"),
    ("reward.correct", 1.0, "DAPO"),
    ("reward.incorrect", -1.0, "DAPO"),
    ("reward.overlong_buffer_tokens", 4096, "DAPO: soft overlong punishment"),
    ("reward.overlong_penalty", 1.0, "DAPO: down to -1"),
    ("evaluation.samples", 32, "VAPO: AIME 2024, avg@32"),
    ("evaluation.temperature", 1.0, "VAPO"),
    ("evaluation.top_p", 0.7, "VAPO"),
]


def test_the_32b_recipe_is_the_papers():
    config = load_config([BASE, overlay("32b")])
    for field, value, source in RECIPE_32B:
        section, name = field.split(".")
        found = getattr(getattr(config, section), name)
        assert found == value and type(found) is type(value), (field, source)


def test_the_32b_recipe_makes_the_papers_updates():
    a = load_config([BASE, overlay("32b")]).algorithm
    assert a.num_prompts == 512
    # 8192 / 512 = 16 updates a rollout; 313 rollouts make 5008: the paper's 5,000, no rollout more.
    assert 5000 <= a.policy_steps * a.responses_per_step // a.mini_batch_size < 5016


def leaves(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def test_a_file_sets_only_what_differs_from_what_is_under_it():
    of_all = [*map(overlay, [*SIZES, "32b_lora"]), CONFIGS / "qwen3_30b_a3b.yaml"]
    for file, under in ((BASE, []), *((file, BASE) for file in of_all)):
        before = dict(leaves(load_config(under).model_dump()))
        for name, value in leaves(yaml.safe_load(file.read_text())):
            assert before[name] != value, f"{file.name} sets {name} to what it is without it"


@pytest.mark.parametrize("size", [*SIZES, "32b_lora"])
def test_a_recipes_longest_response_fits_a_microbatch(size):
    c = load_config([BASE, overlay(size)])
    longest = c.rollout.max_prompt_tokens + c.rollout.max_response_tokens
    assert longest <= c.parallel.max_tokens_per_microbatch
    # Sixteen updates a step in every recipe.
    assert c.algorithm.responses_per_step // c.algorithm.mini_batch_size == 16


def test_the_recipes_are_one_script():
    def text(size):
        model, machine = SIZES[size]
        words = recipe(size).read_text().replace(machine, "MACHINE")
        return words.replace(f"Qwen2.5-{model}", "MODEL").replace(size, "SIZE")

    assert text("32b") == text("7b") == text("0.5b")
    assert text("32b").count("SIZE") == 3 and "MODEL, on MACHINE" in text("32b")
    with_adapters = recipe("32b_lora").read_text().replace("32b_lora", "32b")
    machine = "Qwen2.5-32B with adapters (LoRA), on one node of 8 H100"
    assert with_adapters.replace(machine, "MODEL, on MACHINE").replace("32b", "SIZE") == text("32b")


def test_adapters_learn_ten_times_as_fast_and_differ_in_little_else():
    whole, config = (load_config([BASE, overlay(size)]) for size in ("32b", "32b_lora"))
    assert config.model.lora.rank == 32 and config.model.lora.shares("critic")
    for role in ("actor", "critic"):
        rates = [getattr(c.optimizer, f"{role}_learning_rate") for c in (whole, config)]
        assert rates[1] == pytest.approx(10 * rates[0])
    before, after = (dict(leaves(c.model_dump())) for c in (whole, config))
    changed = {name.split(".")[0] for name in before if before[name] != after[name]}
    assert changed == {"model", "optimizer", "parallel", "rollout", "algorithm", "checkpoint",
                       "logging"}  # fmt: skip
    sizes = {"responses_per_step", "mini_batch_size"}
    others = config.algorithm.model_copy(update={n: getattr(whole.algorithm, n) for n in sizes})
    assert others == whole.algorithm
    assert config.rollout.max_response_tokens == whole.rollout.max_response_tokens


# --- starting one ---------------------------------------------------------------------------------


def command(world_size=8, **environment):
    return torchrun_command(environment, world_size, ["recipe.sh", "--replay", "a b"])


def test_one_node_needs_no_variables():
    port = free_port()
    assert command(MASTER_PORT=f"{port}") == [
        sys.executable, "-m", MODULE, "--nnodes=1", "--node-rank=0",
        "--master-addr=127.0.0.1", f"--master-port={port}", "--nproc-per-node=8",
        "--max-restarts=0", "--", "recipe.sh", "--replay", "a b",
    ]  # fmt: skip
    assert "--nproc-per-node=1" in command(1), "no more processes than the configuration has"
    empty = command(NNODES="", MASTER_ADDR="", MASTER_PORT="")
    assert empty[3:6] == command()[3:6], "empty is as good as unset"


@pytest.mark.parametrize("start", [["recipe.sh"], ["-m", "package.module"]])
def test_torchrun_leaves_the_workers_options_alone(start):
    """Also those that could be short for its own."""
    worker = [*start, "--nproc=2", "--node", "-m", "--", "a=b", "--dry-run"]
    found = run.parse_args(torchrun_command({}, 8, worker)[3:])
    assert found.nproc_per_node == "8" and found.module == (start[0] == "-m")
    assert [found.training_script, *found.training_script_args] == worker[found.module :]


def test_two_runs_on_one_node_have_ports_of_their_own():
    with socket.socket() as other:
        other.bind(("", 0))
        assert command()[6] != f"--master-port={other.getsockname()[1]}"
    variables = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "gpu-17"}
    assert command(16, **variables)[6] == "--master-port=29500", "all nodes agree on one"


def test_several_nodes_take_the_usual_variables():
    variables = {"NNODES": "16", "NODE_RANK": "3", "MASTER_ADDR": "gpu-17", "MASTER_PORT": "4242"}
    assert command(128, **variables)[3:8] == [
        "--nnodes=16", "--node-rank=3", "--master-addr=gpu-17", "--master-port=4242",
        "--nproc-per-node=8",
    ]  # fmt: skip
    assert command(64, **variables, NPROC_PER_NODE="4")[7] == "--nproc-per-node=4"
    assert command(128, **variables, MAX_RESTARTS="3")[8] == "--max-restarts=3"


@pytest.mark.parametrize(
    "world_size,variables,words",
    [
        (128, {}, ["parallel.world_size=128", "NNODES(1)", "NPROC_PER_NODE(8) = 8", "set the"]),
        (8, {"NPROC_PER_NODE": "4"}, ["world_size=8 must be", "NPROC_PER_NODE(4) = 4"]),
        (16, {"NNODES": "2"}, ["NNODES=2 needs NODE_RANK and MASTER_ADDR"]),
        (16, {"NNODES": "2", "NODE_RANK": "1"}, ["NNODES=2 needs MASTER_ADDR:"]),
        (
            16,
            {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"},
            ["NODE_RANK=2 must be less than NNODES=2"],
        ),
        (8, {"NNODES": "1:4"}, ["NNODES=1:4 must be a whole number", "start torchrun yourself"]),
        (8, {"NPROC_PER_NODE": "gpu"}, ["NPROC_PER_NODE=gpu must be a whole number"]),
        (8, {"NPROC_PER_NODE": "0"}, ["NPROC_PER_NODE=0 must be", "at least 1"]),
        (8, {"NODE_RANK": "-1"}, ["NODE_RANK=-1 must be", "at least 0"]),
        (8, {"MASTER_PORT": "http"}, ["MASTER_PORT=http must be"]),
    ],
)
def test_variables_that_cannot_work_are_named(world_size, variables, words):
    with pytest.raises(ConfigError) as caught:
        command(world_size, **variables)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.fixture
def stand_in(tmp_path):
    return make_stand_in(tmp_path)


def inputs(directory, size):
    """Write what a launcher checks, the weights as holes of their size; return the overrides."""
    sizes = {"model_type": "qwen2", **config_json(SIZES[size][0])}
    (directory / "config.json").write_text(json.dumps(sizes))
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}')
    write_tiny_tokenizer(directory)
    tensors = list(hf_tensors(read_model_shape(directory), "actor").items())
    weight_map = {}
    for i in range(16):
        header, end, file = {}, 0, f"model-{i:05d}-of-00016.safetensors"
        for name, shape in tensors[i::16]:
            begin, end = end, end + 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(out.tell() + end)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)
    data = directory / "problems.jsonl"
    data.write_text('{"prompt": "w3 w4", "answer": 2}\n')
    return (f"model.hf_path={directory}", f"data.train_path={data}", "evaluation.path=null")


def test_bash_hands_over_to_torchrun(stand_in, tmp_path):
    arguments = (*inputs(tmp_path, "32b"), f"logging.run_dir={tmp_path}/a b")
    variables = {"NNODES": "16", "NODE_RANK": "1", "MASTER_ADDR": "first"}
    # Some clusters number nodes so; it must not pass for torchrun.
    done = start("bash", recipe("32b"), *arguments, PYTHONPATH=stand_in, RANK="1", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    seen = json.loads(done.stdout)
    assert {"--nnodes=16", "--nproc-per-node=8"} <= set(seen["arguments"])
    assert seen["arguments"][-5:] == [str(recipe("32b")), *arguments]
    assert seen["environment"]["OMP_NUM_THREADS"] == "1"
    assert set(SIGNALS) <= set(seen["blocks"]), "a cluster's early signal would end torchrun"


class Started(BaseException):
    """In the place of becoming torchrun."""


@pytest.fixture
def before_torchrun(monkeypatch):
    """In this process: Started, with the command line, where it would become torchrun."""

    def stop(_, command):
        raise Started(command)

    for name in ("LOCAL_RANK", "NNODES", "NODE_RANK", "NPROC_PER_NODE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "execv", stop)
    unknown = SimpleNamespace(total=0, free=0)  # None here has room for a large model's checkpoint.
    monkeypatch.setattr("shutil.disk_usage", lambda path: unknown)


@pytest.mark.parametrize("size", ["7b", "0.5b"])
def test_the_other_recipes_do_too(size, before_torchrun, monkeypatch, tmp_path):
    arguments = [*inputs(tmp_path, size), f"logging.run_dir={tmp_path}/a b"]
    monkeypatch.setattr(sys, "argv", [str(recipe(size)), *arguments])
    with pytest.raises(Started) as stopped:
        runpy.run_path(sys.argv[0], run_name="__main__")
    (command,) = stopped.value.args
    processes = load_config([BASE, overlay(size)]).parallel.world_size
    assert {"--nnodes=1", f"--nproc-per-node={processes}"} <= set(command)
    assert command[-5:] == sys.argv


def test_the_command_hands_over_to_torchrun(before_torchrun, monkeypatch, tmp_path):
    files = [f"--config={BASE}", f"--config={overlay('0.5b')}"]
    arguments = [*files, *inputs(tmp_path, "0.5b"), f"logging.run_dir={tmp_path}/run"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MAX_RESTARTS", "2")
    with pytest.raises(Started) as stopped:
        main(["train", *arguments])
    (command,) = stopped.value.args
    torchrun, worker = command[: -len(arguments) - 3], command[-len(arguments) - 3 :]
    assert worker == ["-m", "--", "vapo_megatron.train", *arguments]
    assert torchrun[1:3] == ["-m", MODULE]
    assert {"--nproc-per-node=1", "--max-restarts=2"} <= set(torchrun)
    assert os.environ["OMP_NUM_THREADS"] == "3", "what is set already stays"
    # Among them Ctrl-C's: from here on it is the launcher's.
    assert set(SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_as_torchruns_worker_the_command_trains(tmp_path, stand_in):
    arguments = [f"--config={BASE}", "parallel.world_size=3"]
    worker = {"PYTHONPATH": stand_in, "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    done = start(sys.executable, "-m", "vapo_megatron", "train", *arguments, **worker)
    assert (done.returncode, done.stdout) == (2, "")
    assert "parallel.world_size=3 must be the number of processes started, 2" in done.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_names_the_libraries_before_anything_is_built(rank, monkeypatch, capsys):
    def build(*_):
        raise Started

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(train, "check_processes", lambda *_: None)
    monkeypatch.setattr(train, "check_rank", lambda config, replay: Inputs(None))
    monkeypatch.setitem(
        sys.modules, "vapo_megatron.training.loop", SimpleNamespace(VapoTrainer=build)
    )
    with pytest.raises(Started):
        train._train(VapoConfig(), None)
    printed = capsys.readouterr().out
    is_first = printed.startswith(f"vapo_megatron {vapo_megatron.__version__}, found torch ")
    assert is_first == (rank == "0") and printed.count("\n") == is_first


@pytest.mark.parametrize("size", SIZES)
def test_a_dry_run_takes_nothing_from_the_machine(size):
    """Neither the model, nor any launcher's variables, nor the directory it is started in."""
    override = f"model.hf_path=/nowhere/Qwen2.5-{SIZES[size][0]}"
    variables = {"RANK": "5", "WORLD_SIZE": "7", "NNODES": "3", "NPROC_PER_NODE": "x"}
    script = f"cd / && exec bash {recipe(size)} --dry-run {override}"
    done = start("bash", "-c", script, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(load_config([BASE, overlay(size)], [override]).to_yaml())


def dry_run(way, script, model, overlay):
    """What a recipe shows, started either way, and its configuration."""
    override = f"model.hf_path=/nowhere/{model}"
    launcher = ["bash"] if way == "bash" else [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--no-python", "bash",
    ]  # fmt: skip
    done = start(*launcher, script, "--dry-run", override)
    assert done.returncode == 0, done.stderr
    config = load_config([BASE, overlay], [override])
    assert done.stdout.startswith(config.to_yaml())
    return done.stdout, config


@pytest.mark.parametrize("way", ["bash", "torchrun"])
def test_the_mixture_of_experts_is_started_either_way(way):
    script = ROOT / "examples/run_vapo_qwen3_30b_a3b.sh"
    shown, _ = dry_run(way, script, "Qwen3-30B-A3B", CONFIGS / "qwen3_30b_a3b.yaml")
    assert "30.53e9 parameters" in shown and "TP 1 x PP 1 x EP 8" in shown


@pytest.mark.parametrize("way", ["bash", "torchrun"])
def test_adapters_on_one_node_are_started_either_way(way):
    shown, config = dry_run(way, recipe("32b_lora"), "Qwen2.5-32B", overlay("32b_lora"))
    lines = shown.splitlines()
    assert "# fits" in lines and "TP 2 x PP 1 x DP 4" in shown
    assert "#   base: one copy of 32.8 GB on each GPU, of actor, critic" in lines
    assert config.parallel.world_size == 8


def test_help_calls_the_recipe_by_its_name():
    done = start("bash", recipe("7b"), "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: run_vapo_qwen7b.sh [--config")
    assert "bring their own" in done.stdout and "algorithm.clip_high=0.28" in done.stdout


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["--dryrun"], "unrecognized arguments: --dryrun; --help"),
        (["algorithm.gama=1"], "did you mean algorithm.gamma?"),
        (["--config"], "argument --config: expected one argument"),
        ([], "model.hf_path=models/Qwen2.5-7B does not exist"),
        (["parallel.world_size=16"], "world_size=16 must be NNODES(1) * NPROC_PER_NODE(8) = 8"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_starts(arguments, words, stand_in):
    done = start("bash", recipe("7b"), *arguments, PYTHONPATH=stand_in)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_mistake_in_a_file_is_found_before_torchrun(before_torchrun, tmp_path, capsys):
    arguments = [f"--config={BASE}", *inputs(tmp_path, "0.5b"), f"logging.run_dir={tmp_path}/run"]
    os.truncate(tmp_path / "model-00003-of-00016.safetensors", 100_000)
    assert main(["train", *arguments]) == 2
    printed, told = capsys.readouterr()
    assert "model-00003-of-00016.safetensors cannot be read" in told
    assert printed == "" and told.count("\n") == 1


def test_a_configuration_is_required_without_a_recipe():
    done = start(sys.executable, "-m", "vapo_megatron.train", "--dry-run")
    assert done.returncode == 2 and done.stderr.startswith("error: --config FILE is required")


def test_a_python_without_the_requirements_is_named(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = start("bash", recipe("7b"), "--dry-run", VAPO_PYTHON=str(bare))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "has no module 'pydantic'; activate the environment" in done.stderr


@pytest.mark.slow
def test_torchrun_tells_a_mistake_once():
    port = f"--master-port={free_port()}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", port]
    done = start(*torchrun, recipe("7b"), "algorithm.gamma=2", OMP_NUM_THREADS="1")
    told = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode != 0 and len(told) == 1, done.stderr
    assert "algorithm.gamma=2 must be" in told[0]


def test_a_mistake_on_another_node_than_the_first_is_told_there(tmp_path):
    """As torchrun starts ranks 4 and 5 of node 1, where the model is missing."""
    lines = []
    for local_rank in (1, 0):
        place = tmp_path / f"attempt_0/{local_rank}"
        place.mkdir(parents=True)
        variables = {"RANK": str(4 + local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "8"}
        variables["TORCHELASTIC_ERROR_FILE"] = str(place / "error.json")
        done = start(sys.executable, recipe("7b"), **variables)
        assert done.returncode == 2
        lines += done.stderr.splitlines()
        # Another mistake than the one that has been told.
        done = start(sys.executable, recipe("7b"), "seed=-1", **variables)
        lines += done.stderr.splitlines()
    assert len(lines) == 2, lines
    assert "model.hf_path=models/Qwen2.5-7B does not exist" in lines[0] and "seed=-1" in lines[1]

"""Commands that start torchrun themselves: how many processes, and mistakes that are found before.

torchrun is a stand-in that prints its command line. What the processes do is in
tests/e2e/test_evaluate.py and test_gradient_check.py.
"""

import json
import os
import sys

import pytest

from tests.cli.starting import ROOT, make_stand_in, start
from tests.dumped import MODEL, config, dump
from tests.rollout.tiny_tokenizer import write_tiny_tokenizer
from tests.weights.tiny_hf import write_tiny_hf

VAPO = (sys.executable, "-m", "vapo_megatron")


@pytest.fixture
def place(tmp_path):
    """A model and a data file."""
    write_tiny_hf(tmp_path / "model", num_layers=1, vocab=64)
    write_tiny_tokenizer(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "w3 w4", "answer": 2}\n')
    return tmp_path


def evaluation(place, *more):
    paths = ("--checkpoint", place / "model", "--data", place / "data.jsonl", "--out", place / "o")
    lengths = ("rollout.max_prompt_tokens=8", "rollout.max_response_tokens=8")
    return tuple(map(str, (*paths, *lengths, *more)))


def started(place, *command, **environment):
    """Return (torchrun's own options, the worker's command line)."""
    done = start(*command, PYTHONPATH=make_stand_in(place), **environment)
    assert (done.returncode, done.stderr) == (0, "")
    given = json.loads(done.stdout)["arguments"]
    count = next(i for i, argument in enumerate(given) if argument.startswith("--max-restarts"))
    return given[: count + 1], given[count + 1 :]


@pytest.mark.parametrize(
    ("more", "processes"),
    [
        (["rollout.tensor_model_parallel_size=2"], 2),
        (["rollout.tensor_model_parallel_size=2", "--nproc", "6"], 6),
        (["--nproc=3"], 3),
    ],
)
def test_an_evaluation_starts_its_processes(place, more, processes):
    arguments = evaluation(place, *more)
    # Variables of a cluster's training job say nothing about an evaluation.
    torchrun, worker = started(place, *VAPO, "evaluate", *arguments, NNODES="4", RANK="1")
    assert {f"--nproc-per-node={processes}", "--nnodes=1"} <= set(torchrun)
    assert worker == ["-m", "--", "vapo_megatron", "evaluate", *arguments]


def test_the_tool_starts_itself(place):
    arguments = evaluation(place, "--nproc=2")
    worker = started(place, sys.executable, ROOT / "tools/evaluate.py", *arguments)[1]
    assert worker == ["--", str(ROOT / "tools/evaluate.py"), *arguments]


@pytest.fixture
def collection(place, workers):
    """A command line of vapo gradients, on a dump."""
    workers.run(1, dump, place / "run/replay", [1], 1)
    file = place / "config.yaml"
    file.write_text(config(write_tiny_hf(place / "hf", **MODEL)).to_yaml())
    paths = ("--config", file, "--replay", place / "run", "--out", place / "out")
    return tuple(map(str, ("gradients", "collect", *paths, "parallel.world_size=2")))


def test_gradients_start_the_processes_of_their_layout(place, collection):
    torchrun, worker = started(place, *VAPO, *collection)
    assert "--nproc-per-node=2" in torchrun and worker == ["-m", "--", "vapo_megatron", *collection]


def refused(place, words, *arguments):
    done = start(*VAPO, *arguments, PYTHONPATH=make_stand_in(place))
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("data.jsonl", "{\n", "data.jsonl, line 1 is not JSON"),
        ("o", "{}\n", "is not an evaluation's file; give another --out"),
    ],
)
def test_an_evaluations_mistake_is_found_before_torchrun(place, file, text, words):
    (place / file).write_text(text)
    refused(place, words, "evaluate", *evaluation(place, "--nproc=2"))


def test_a_damaged_dump_is_found_before_torchrun(place, collection):
    os.truncate(next((place / "run").rglob("*.safetensors")), 100)
    refused(place, "cannot be read (", *collection)

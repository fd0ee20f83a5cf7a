"""Commands that start torchrun themselves: how many processes, and mistakes that are found before.

torchrun is a stand-in that prints its command line, or, where one start has shown that it is real,
the command stops in this process where it would become torchrun. What the processes do is in
tests/e2e/test_evaluate.py and test_gradient_check.py.
"""

import json
import os
import sys

import pytest

from tests.cli.starting import make_stand_in, start
from tests.dumped import MODEL, config, dump
from tests.weights.tiny_hf import write_tiny_hf, write_tiny_model
from vapo_megatron.cli.main import main


@pytest.fixture
def place(tmp_path):
    """A model and a data file."""
    write_tiny_model(tmp_path / "model", num_layers=1, hidden=128, vocab=64)
    (tmp_path / "data.jsonl").write_text('{"prompt": "w3 w4", "answer": 2}\n')
    return tmp_path


def evaluation(place, *more):
    paths = ("--checkpoint", place / "model", "--data", place / "data.jsonl", "--out", place / "o")
    lengths = ("rollout.max_prompt_tokens=8", "rollout.max_response_tokens=8")
    return tuple(map(str, (*paths, *lengths, *more)))


def read_command(given):
    """(torchrun's own options, the worker's command line)."""
    count = next(i for i, argument in enumerate(given) if argument.startswith("--max-restarts"))
    return given[: count + 1], given[count + 1 :]


def started(place, *command):
    """read_command of a process that is started as a user does."""
    done = start(*command, PYTHONPATH=make_stand_in(place))
    assert (done.returncode, done.stderr) == (0, "")
    return read_command(json.loads(done.stdout)["arguments"])


class Started(BaseException):
    """In the place of becoming another program."""


@pytest.fixture
def vapo(monkeypatch):
    """vapo(*arguments): the command in this process; Started with what it would become."""

    def stop(_, command):
        raise Started(command[3:])

    for name in ("LOCAL_RANK", "NNODES", "NODE_RANK", "NPROC_PER_NODE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "execv", stop)
    return lambda *arguments: main(arguments)


@pytest.mark.parametrize(
    ("more", "processes"),
    [
        (["rollout.tensor_model_parallel_size=2"], 2),
        (["rollout.tensor_model_parallel_size=2", "--nproc", "6"], 6),
        (["--nproc=3"], 3),
    ],
)
def test_an_evaluation_starts_its_processes(place, vapo, monkeypatch, more, processes):
    arguments = evaluation(place, *more)
    # Variables of a cluster's training job say nothing about an evaluation.
    monkeypatch.setenv("NNODES", "4")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(Started) as stopped:
        vapo("evaluate", *arguments)
    torchrun, worker = read_command(*stopped.value.args)
    assert {f"--nproc-per-node={processes}", "--nnodes=1"} <= set(torchrun)
    assert worker == ["-m", "--", "vapo_megatron", "evaluate", *arguments]


@pytest.fixture
def collection(place, workers):
    """A command line of vapo gradients, on a dump."""
    workers.run(1, dump, place / "run/replay", [1], 1)
    file = place / "config.yaml"
    file.write_text(config(write_tiny_hf(place / "hf", **MODEL)).to_yaml())
    paths = ("--config", file, "--replay", place / "run", "--out", place / "out")
    return tuple(map(str, ("gradients", "collect", *paths, "parallel.world_size=2")))


def test_gradients_start_the_processes_of_their_layout(place, collection):
    torchrun, worker = started(place, sys.executable, "-m", "vapo_megatron", *collection)
    assert "--nproc-per-node=2" in torchrun and worker == ["-m", "--", "vapo_megatron", *collection]


@pytest.fixture
def refused(vapo, capsys):
    """refused(words, *arguments): the command ends with 2 and one line that holds the words."""

    def check(words, *arguments):
        assert vapo(*arguments) == 2
        printed, told = capsys.readouterr()
        assert printed == "" and words in told and told.count("\n") == 1

    return check


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("data.jsonl", "{\n", "data.jsonl, line 1 is not JSON"),
        ("o", "{}\n", "is not an evaluation's file; give another --out"),
    ],
)
def test_an_evaluations_mistake_is_found_before_torchrun(place, refused, file, text, words):
    (place / file).write_text(text)
    refused(words, "evaluate", *evaluation(place, "--nproc=2"))


def test_a_damaged_dump_is_found_before_torchrun(place, refused, collection):
    os.truncate(next((place / "run").rglob("*.safetensors")), 100)
    refused("cannot be read (", *collection)

"""What a run asks of the sampler from step to step, what it gives it, and what it makes of both.

A whole run in one process, straight and resumed, with its data, verifier, models, updates,
checkpoints and files. vLLM alone, with the way of the weights into it, is a stand-in that notes
what it is asked and given. Not exercised: several ranks (tests/rollout/test_dynamic_sampling.py),
the weight sync itself (tests/weights), vLLM (tests/rollout/vllm/test_engine.py).
"""

import contextlib
import itertools
import json
import random
import sys
from statistics import fmean
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import jsonl, reference
from tests.dumped import MODEL
from tests.sealed import seal
from tests.whole_run import (
    RIGHT,
    WRONG,
    Engine,
    answered,
    measured,
    settings,
    trainer,
    without_vllm,
    write_inputs,
)
from vapo_megatron.config import VapoConfig
from vapo_megatron.models import sampled
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel.health.early_stop import EarlyStop
from vapo_megatron.rollout.inputs import read_inputs
from vapo_megatron.rollout.requests import SamplingSettings

PROBLEMS, HELD_OUT = 6, 2
SEED, SAMPLES = 7, 3


class Asked(NamedTuple):
    """One call of the sampler."""

    settings: SamplingSettings
    policy_version: int
    problems: list[int]
    """Of each group."""
    seeds: list[int]
    has_time: str
    """Which question it may ask now and then."""
    begun: int
    """How often the clock was started that the answer depends on."""


class AskedEngine(Engine):
    """Answers 7 or 8 to everything: of a group's samples those before its right ones are right."""

    def __init__(self, seed):
        super().__init__(seed=seed)
        self.calls: list[Asked] = []

    def asked(self, requests, sampling, policy_version, has_time):
        assert policy_version == self.policy_version
        problems = [r.rollout.prompt.index for r in requests if r.rollout.sample == 0]
        seeds = [request.seed for request in requests]
        begun = EarlyStop.begin.call_count
        self.calls.append(
            Asked(sampling, policy_version, problems, seeds, has_time.__name__, begun)
        )

    def respond(self, rollout, seed):
        at, right = rollout.position % 5, rollout.sample < 1 + rollout.prompt.index % 2
        ids = [*(3 + seed // 57**t % 57 for t in range(at)), RIGHT if right else WRONG]
        return answered(rollout, ids, logprob=-4.0)


class Done(NamedTuple):
    """What a run has asked and given, and its rows."""

    asked: list[Asked]
    published: list[tuple[int, float]]
    rows: list[dict[str, Any]]
    problems: list[dict[str, Any]]
    records: list[list[dict[str, Any]]]
    """Of each step its responses, with their tokens."""
    notes: list[str]
    """For the user."""


def settings_of(hf, tmp, name, policy_steps):
    return settings(
        hf,
        tmp / name,
        SEED,
        algorithm={
            "value_pretraining_steps": 1, "policy_steps": policy_steps, "dynamic_sampling": True,
        },
        rollout={"temperature": 0.8, "max_logprob_difference": None, "shared_queue": True},
        optimizer={"actor_learning_rate": 1e-2, "actor_warmup_updates": 0},
        data={"train_path": str(tmp / "train.jsonl"), "shuffle": False},
        evaluation={
            "path": str(tmp / "test.jsonl"), "every_steps": 2, "samples": SAMPLES,
            "temperature": 0.6, "top_p": 0.9, "top_k": 5,
        },
        reward={"num_workers": 1, "overlong_buffer_tokens": 9},
        checkpoint={"hf_export": False},
        parallel={"recompute": "full"},
        logging={"rollout_groups": 9},
    )  # fmt: skip


@contextlib.contextmanager
def stand_ins():
    """Let a run in the body sample without vLLM, and count how often its clock is started."""
    clock = mock.patch.object(EarlyStop, "begin", autospec=True, side_effect=EarlyStop.begin)
    with without_vllm(AskedEngine), clock:
        yield


def fit(hf, tmp, name, policy_steps, seeds=0):
    """Make the steps that the run of this name lacks; every phase begins with other random states.

    A worker's function.
    """
    from vapo_megatron.training.loop import VapoTrainer

    run_dir, seeds, phase, notes = tmp / name, itertools.count(seeds), VapoTrainer.phase, []

    def disturbed(trainer, name):
        seed = next(seeds)
        for library in (torch.manual_seed, np.random.seed, random.seed):
            library(seed)
        return phase(trainer, name)

    given = settings_of(hf, tmp, name, policy_steps)
    disturbing = mock.patch.object(VapoTrainer, "phase", disturbed)
    with stand_ins(), disturbing, trainer(given) as made:
        made.output.note = notes.append
        made.fit()
        source = made.source
    records = [
        [response for group in jsonl.read(file) for response in group["responses"]]
        for file in sorted(run_dir.glob("rollouts/*.jsonl"))
    ]
    found = jsonl.read(run_dir / "metrics.jsonl"), jsonl.read(run_dir / "problems.jsonl"), records
    return Done(source.engine.calls, source._sync.published, *found, notes)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """(model, directory of the data)."""
    return write_inputs(tmp_path_factory.mktemp("sampling_wiring"), train=PROBLEMS, test=HELD_OUT)


@pytest.fixture(scope="module")
def straight(workers, inputs):
    """A run of three steps, the first of which is value pretraining."""
    (done,) = workers.run(1, fit, *inputs, "straight", 2)
    return done


TRAINING = SamplingSettings(0.8, 1.0, -1, 12, "train", whole_groups=True, shared=True)
EVALUATION = SamplingSettings(0.6, 0.9, 5, 12, "evaluation", whole_groups=True)


def test_each_kind_of_sampling_has_its_own_settings(straight):
    """In the order of the run, at the policy's version and with the problems that come next."""

    def training(version, problems, begun):
        return Asked(TRAINING, version, problems, [], "has_time_to_finish", begun)

    def evaluation(version, begun):
        return Asked(EVALUATION, version, [0, 1], [], "has_time_to_evaluate", begun)

    assert [asked._replace(seeds=[]) for asked in straight.asked] == [
        evaluation(0, 1),
        training(0, [0, 1, 2, 3], 2),
        training(0, [4, 5, 0, 1], 3),
        evaluation(1, 4),
        training(1, [2, 3, 4, 5], 5),
        evaluation(2, 6),
    ]


def test_a_checkpoint_says_under_which_settings_it_was_made(straight, inputs):
    hf, tmp = inputs
    state = json.loads((tmp / "straight/checkpoints/step_000003/state.json").read_text())["run"]
    c = settings_of(hf, tmp, "straight", 2)
    assert VapoConfig.model_validate(state["config"]) == c
    shape = read_model_shape(hf)
    stop = read_inputs(shape, str(hf), c.data, c.rollout, c.evaluation, seed=0).stop_token_ids
    assert stop and state["stop_token_ids"] == list(stop)
    assert state["date"] is None, "no prompt is a chat"


def test_no_two_steps_share_a_seed_and_all_evaluations_do(straight):
    training = [asked for asked in straight.asked if asked.settings.seed_role == "train"]
    seeds = [seed for asked in training for seed in asked.seeds]
    assert len(set(seeds)) == len(seeds) == 3 * 16, "each problem is met in two of the steps"
    first, *others = (a for a in straight.asked if a.settings.seed_role == "evaluation")
    assert len(set(first.seeds) - set(seeds)) == HELD_OUT * SAMPLES
    assert all(asked.seeds == first.seeds for asked in others)


def test_every_policy_is_published_once(straight):
    """The first before anything is sampled, and the critic's pretraining makes no other."""
    versions, sizes = zip(*straight.published, strict=True)
    assert versions == (0, 1, 2)
    assert len(set(sizes)) == 3
    received = [row.get("sync/received_bytes") for row in straight.rows]
    assert received == [None, None, 1001, 1002]


def test_rows_hold_what_was_sampled_and_evaluated(straight):
    evaluated = [row.get(f"evaluation/avg@{SAMPLES}") for row in straight.rows]
    # One of three is right, and two of three.
    assert evaluated == [0.5, None, 0.5, 0.5]
    groups = [row.get("rollout/groups_sampled") for row in straight.rows]
    assert groups == [None, None, 4, 4], "value pretraining takes what comes"
    right = [row.get("reward/correct_fraction") for row in straight.rows]
    assert right == [None, 6 / 16, 6 / 16, 6 / 16]
    problems = [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
    assert [row["problems"] for row in straight.problems] == problems
    assert [row["step"] for row in straight.problems] == [1, 2, 3]
    assert all(row["correct"] == [1, 2, 1, 2] for row in straight.problems)


def test_responses_for_people_have_the_numbers_that_were_trained_on(straight):
    # Lengths 1 2 3 4 5 1 ...: of nine tokens before the limit of 12 the fifth one reaches the
    # second, and costs 2/9; the fourth one costs 1/9.
    for row, records in zip(straight.rows[1:], straight.records, strict=True):
        assert len(records) == 16
        for response in records:
            base = 1.0 if response["status"] == "correct" else -1.0
            punishment = max(0, response["num_tokens"] - 3) / 9
            assert response["reward"] == pytest.approx(base - punishment)
        tokens = [response["tokens"] for response in records]
        for name, metric in (
            ("entropy", "actor/entropy"), ("advantages", "algorithm/advantage_mean"),
        ):  # fmt: skip
            numbers = [x for one in tokens for x in one[name]]
            assert fmean(numbers) == pytest.approx(row[metric], abs=1e-3), name
        values = [v for one in tokens for v in one["values"]]
        # lambda is 1 for the critic: each token's return is its response's reward.
        returns = [r["reward"] for r in records for _ in r["tokens"]["values"]]
        explained = reference.explained_variance(values, returns)
        assert explained == pytest.approx(row["critic/explained_variance"], abs=2e-3)


def test_a_resumed_run_asks_for_what_is_left(straight, workers, inputs):
    """And is the same, though random states differ: nobody reads them."""
    tmp = inputs[1]
    (before,) = workers.run(1, fit, *inputs, "resumed", 1, 1_000_000)
    saved = tmp / "resumed/checkpoints/step_000002"
    # Checkpoints had one of each rank once.
    torch.save(torch.get_rng_state(), saved / "rng_0000.pt")
    seal(saved)
    (after,) = workers.run(1, fit, *inputs, "resumed", 2, 2_000_000)
    assert after.notes[:2] == [
        f"resumed {tmp / 'resumed'} after step 2",
        f"changed since {saved}: algorithm.policy_steps: 1 -> 2",
    ]
    assert not any("changed" in note for note in (*straight.notes, *before.notes))
    clocks = [asked._replace(begun=0) for asked in straight.asked]
    assert [asked._replace(begun=0) for asked in (*before.asked, *after.asked)] == clocks
    # A new sampler holds nothing.
    assert after.published == straight.published[1:]
    assert after.problems == straight.problems and after.records == straight.records
    assert measured(tmp / "resumed") == measured(tmp / "straight")
    states = []
    for name in ("resumed", "straight"):
        state = json.loads((tmp / f"{name}/checkpoints/step_000003/state.json").read_text())
        assert state["run"]["config"]["logging"].pop("run_dir") == str(tmp / name)
        states.append(state)
    assert states[0] == states[1] and states[0]["run"]["policy_version"] == 2


def reads(hf, tmp):
    """What the command reads on its way through a run, and how often; a worker's function."""
    from transformers import PreTrainedTokenizerFast as Tokenizer

    from vapo_megatron.cli.train import main

    dist.destroy_process_group()
    (tmp / "config.yaml").write_text(settings_of(hf, tmp, "counted", 1).to_yaml())
    opened, counting = [], [True]

    def note(event, arguments):
        if counting and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(note)
    made = mock.patch.object(Tokenizer, "__init__", autospec=True, side_effect=Tokenizer.__init__)
    encode = mock.patch.object(Tokenizer, "encode", autospec=True, side_effect=Tokenizer.encode)
    # vLLM itself is not there to refuse the model's heads.
    heads = mock.patch.object(sampled, "CPU_HEAD_DIMS", (MODEL["hidden"] // MODEL["heads"],))
    with stand_ins(), heads, made as made, encode as encode:
        code = main(["--config", str(tmp / "config.yaml")])
    counting.clear()
    encoded = [call.args[1] for call in encode.call_args_list]
    files = {"config": hf / "config.json", "train": tmp / "train.jsonl", "test": tmp / "test.jsonl"}
    counts = {name: opened.count(str(file)) for name, file in files.items()}
    return code, made.call_count, encoded, counts


def test_a_rank_reads_everything_once(workers, inputs):
    (found,) = workers.run(1, reads, *inputs)
    code, tokenizers, encoded, counts = found
    assert (code, tokenizers) == (0, 1)
    problems = [f"w{i + 3}" for i in range(PROBLEMS)]
    of_data = [text for text in encoded if text.startswith("w")]
    assert of_data == problems + problems[:HELD_OUT]
    # What the tokenizer puts around texts is seen in a few others, however many problems there are.
    assert len(encoded) - len(of_data) <= 6
    # The model's sizes, what vLLM makes of it, then its stop tokens.
    assert counts == {"config": 3, "train": 1, "test": 1}

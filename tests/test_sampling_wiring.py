"""What a run asks of the sampler from step to step, what it gives it, and what it makes of both.

A whole run in one process, straight and resumed, with its data, verifier, models, updates,
checkpoints and files. vLLM alone, with the way of the weights into it, is a stand-in that notes
what it is asked and given. Not exercised: several ranks (tests/rollout/test_dynamic_sampling.py),
the weight sync itself (tests/weights), vLLM (tests/rollout/vllm/test_engine.py).
"""

import contextlib
import json
import os
import sys
from array import array
from statistics import fmean
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist

from tests import reference
from tests.dumped import MODEL, config
from tests.rollout.test_dynamic_sampling import vllm_replaced_by
from tests.rollout.tiny_tokenizer import ANSWERS, write_tiny_tokenizer
from tests.weights.tiny_hf import write_tiny_hf
from tests.workers import free_port
from vapo_megatron.config import VapoConfig
from vapo_megatron.data.rollout import Rollout
from vapo_megatron.models import sampled
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel.health.early_stop import EarlyStop
from vapo_megatron.rollout.inputs import read_inputs
from vapo_megatron.rollout.requests import SamplingSettings, request_seeds

PROBLEMS, HELD_OUT = 6, 2
SEED, SAMPLES = 7, 3


class Asked(NamedTuple):
    """One call of the sampler."""

    step: int
    settings: SamplingSettings
    policy_version: int
    problems: list[int]
    """Of each group."""
    seeds: list[int]
    has_time: str
    """Which question it may ask now and then."""
    begun: int
    """How often the clock was started that the answer depends on."""


class Engine:
    """Answers 7 or 8 to everything: of a group's samples those before its right ones are right."""

    def __init__(self, hf_path, inputs, rollout, *, dtype, seed, offload):
        self.replica, self.num_replicas, self.seed = dist.get_rank(), dist.get_world_size(), seed
        self.policy_version: int | None = None
        self.asked: list[Asked] = []

    def generate(
        self, prompts, group_size, step, sampling, policy_version, on_progress, has_time,
        on_finished,
    ):  # fmt: skip
        assert policy_version == self.policy_version
        role, round = sampling.seed_role, sampling.round
        seeds = request_seeds(
            prompts, group_size, seed=self.seed, step=step, role=role, round=round
        )
        problems = [p.index for p in prompts[::group_size]]
        begun = EarlyStop.begin.call_count
        self.asked.append(
            Asked(step, sampling, policy_version, problems, seeds, has_time.__name__, begun)
        )
        on_progress(len(prompts), len(prompts))
        right, wrong = (MODEL["vocab"] - n for n in (2, 1))
        rollouts = [
            Rollout(
                prompt=prompt,
                sample=i % group_size,
                position=i,
                token_ids=array("i", [*(3 + seed // 57**t % 57 for t in range(i % 5)), answer]),
                logprobs=array("f", [-4.0] * (1 + i % 5)),
                truncated=False,
                policy_version=policy_version,
            )
            for i, (prompt, seed) in enumerate(zip(prompts, seeds))
            for answer in [right if i % group_size < 1 + prompt.index % 2 else wrong]
        ]
        for rollout in rollouts:
            on_finished(rollout)
        return rollouts

    def shutdown(self):
        pass


class Sync:
    """Notes which weights it would bring, by their sum of squares."""

    def __init__(self, shape, ranks, model, rollout, engine):
        self.engine = engine
        self.published: list[tuple[int, float]] = []

    def publish(self, chunks, policy_version):
        parameters = [p for chunk in chunks for p in chunk.parameters()]
        size = sum(float(p.detach().double().square().sum()) for p in parameters)
        self.published.append((policy_version, size))
        self.engine.policy_version = policy_version
        return {"sync/received_bytes": 1000.0 + policy_version}


class Done(NamedTuple):
    """What a run has asked and given, and its rows."""

    asked: list[Asked]
    published: list[tuple[int, float]]
    rows: list[dict[str, Any]]
    problems: list[dict[str, Any]]
    records: list[list[dict[str, Any]]]
    """Of each step its responses, with their tokens."""


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def settings_of(hf, tmp, name, policy_steps):
    settings = config(
        hf,
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
        logging={
            "run_dir": str(tmp / name), "tensorboard": False, "progress": "off",
            "rollout_groups": 9,
        },
    )  # fmt: skip
    return settings.model_copy(update={"seed": SEED})


@contextlib.contextmanager
def stand_ins():
    """Let a run in the body sample without vLLM, and count how often its clock is started."""
    from vapo_megatron.rollout import sampling

    with (
        vllm_replaced_by(Engine),
        mock.patch.object(EarlyStop, "begin", autospec=True, side_effect=EarlyStop.begin),
        mock.patch.object(sampling, "WeightSync", Sync),
    ):
        yield


def fit(hf, tmp, name, policy_steps, port):
    """Make the steps that the run of this name lacks; a worker's function."""
    from vapo_megatron.training.loop import VapoTrainer

    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    run_dir, settings = tmp / name, settings_of(hf, tmp, name, policy_steps)
    with stand_ins(), VapoTrainer(settings) as trainer:
        trainer.fit()
        source = trainer.source
    records = [
        [response for group in lines(file) for response in group["responses"]]
        for file in sorted(run_dir.glob("rollouts/*.jsonl"))
    ]
    found = lines(run_dir / "metrics.jsonl"), lines(run_dir / "problems.jsonl"), records
    return Done(source.engine.asked, source._sync.published, *found)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """(model, directory of the data)."""
    tmp = tmp_path_factory.mktemp("sampling_wiring")
    for name, count in (("train", PROBLEMS), ("test", HELD_OUT)):
        rows = [{"prompt": f"w{i + 3}", "answer": "7"} for i in range(count)]
        (tmp / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    hf = write_tiny_hf(tmp / "hf", **MODEL)
    write_tiny_tokenizer(hf, MODEL["vocab"], last=ANSWERS)
    return hf, tmp


@pytest.fixture(scope="module")
def straight(workers, inputs):
    """A run of three steps, the first of which is value pretraining."""
    (done,) = workers.run(1, fit, *inputs, "straight", 2, free_port())
    return done


TRAINING = SamplingSettings(0.8, 1.0, -1, 12, "train", whole_groups=True, shared=True)
EVALUATION = SamplingSettings(0.6, 0.9, 5, 12, "evaluation", whole_groups=True)


def test_each_kind_of_sampling_has_its_own_settings(straight):
    """In the order of the run, at the policy's version and with the problems that come next."""

    def training(step, version, problems, begun):
        return Asked(step, TRAINING, version, problems, [], "has_time_to_finish", begun)

    def evaluation(version, begun):
        return Asked(0, EVALUATION, version, [0, 1], [], "has_time_to_evaluate", begun)

    assert [asked._replace(seeds=[]) for asked in straight.asked] == [
        evaluation(0, 1),
        training(0, 0, [0, 1, 2, 3], 2),
        training(1, 0, [4, 5, 0, 1], 3),
        evaluation(1, 4),
        training(2, 1, [2, 3, 4, 5], 5),
        evaluation(2, 6),
    ]


def test_a_checkpoint_says_under_which_settings_it_was_made(straight, inputs):
    hf, tmp = inputs
    state = json.loads((tmp / "straight/checkpoints/step_000003/state.json").read_text())["run"]
    settings = settings_of(hf, tmp, "straight", 2)
    assert VapoConfig.model_validate(state["config"]) == settings
    stop = read_inputs(
        read_model_shape(hf), str(hf), settings.data, settings.rollout, settings.evaluation, seed=0
    ).stop_token_ids
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
    (before,) = workers.run(1, fit, *inputs, "resumed", 1, free_port())
    (after,) = workers.run(1, fit, *inputs, "resumed", 2, free_port())
    clocks = [asked._replace(begun=0) for asked in straight.asked]
    assert [asked._replace(begun=0) for asked in (*before.asked, *after.asked)] == clocks
    # A new sampler holds nothing.
    assert after.published == straight.published[1:]
    assert after.problems == straight.problems and after.records == straight.records
    varying = ("time/", "memory/", "tokens_per_second")
    for again, row in zip(after.rows, straight.rows, strict=True):
        assert again.keys() == row.keys()
        for name in row:
            assert name.startswith(varying) or again[name] == row[name], name


def reads(hf, tmp, port):
    """What the command reads on its way through a run, and how often; a worker's function."""
    from transformers import PreTrainedTokenizerFast as Tokenizer

    from vapo_megatron.cli.train import main

    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
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
    (found,) = workers.run(1, reads, *inputs, free_port())
    code, tokenizers, encoded, counts = found
    assert (code, tokenizers) == (0, 1)
    problems = [f"w{i + 3}" for i in range(PROBLEMS)]
    of_data = [text for text in encoded if text.startswith("w")]
    assert of_data == problems + problems[:HELD_OUT]
    # What the tokenizer puts around texts is seen in a few others, however many problems there are.
    assert len(encoded) - len(of_data) <= 6
    # The model's sizes, what vLLM makes of it, then its stop tokens.
    assert counts == {"config": 3, "train": 1, "test": 1}

"""VapoTrainer(config, verifier=...).fit(): a run judged by an object made in the same program.

A whole run in one process whose vLLM is a stand-in that answers 7 or 8; the verifier's processes
are real. A class that the configuration names is in tests/docs/test_own_task.py. Not exercised:
several ranks.
"""

import os

import pytest
import torch.distributed as dist

from tests import jsonl
from tests.dumped import MODEL, NUM_RESPONSES
from tests.rollout.tiny_tokenizer import ANSWERS
from tests.test_sampling_wiring import SAMPLES, stand_ins
from tests.weights.tiny_hf import write_tiny_model
from tests.whole_run import settings
from vapo_megatron import VapoConfig
from vapo_megatron.errors import ConfigError, DataError
from vapo_megatron.reward.verifier import Verdict

ROWS = [
    {"prompt": "w3", "answer": "7", "tolerance": 0},
    {"prompt": "w4", "answer": "6", "tolerance": 1},
    {"prompt": "w5", "answer": "9", "tolerance": 0},
    {"prompt": "w6", "answer": "8", "verifier": "math"},
]


def near(marker):
    """An instance of a class that no import finds, which keeps what it was made with."""

    class Near:
        def __init__(self):
            self.marker = marker

        def check(self, problem):
            return None if "tolerance" in problem.metadata else "has no column tolerance"

        def score(self, responses, problems):
            return [self.judge(r, p) for r, p in zip(responses, problems, strict=True)]

        def judge(self, response, problem):
            answer = int(response.rpartition(self.marker)[2])
            off = abs(answer - int(problem.answer))
            status = "correct" if off <= problem.metadata["tolerance"] else "wrong"
            score, metrics = 1 / (1 + off), {"off": off}
            return Verdict(status, score, str(answer), f"{off} off", metrics)

    return Near()


def settings_of(tmp, name):
    return settings(
        tmp / "hf",
        tmp / f"run_{name}",
        rollout={"max_logprob_difference": None},
        data={"train_path": str(tmp / f"{name}.jsonl"), "shuffle": False},
        evaluation={"path": str(tmp / "train.jsonl"), "samples": SAMPLES},
        # The reward is the score; mathematics, which has none, gives the ends.
        reward={"num_workers": 1, "timeout_seconds": 60.0, "from_score": [0.0, 1.0]},
        checkpoint={"hf_export": False},
        logging={"rollout_groups": 9},
    )


def fit(tmp, name):
    """(rows, the groups of each step), or what the user is told; a worker's function.

    As in a program that torchrun has not started.
    """
    from vapo_megatron import VapoTrainer

    dist.destroy_process_group()
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    with pytest.raises(ConfigError, match="world_size=2 must be the number of processes started"):
        VapoTrainer(VapoConfig(parallel={"world_size": 2}))
    with stand_ins():
        try:
            with VapoTrainer(settings_of(tmp, name), verifier=near("Answer: ")) as trainer:
                trainer.fit()
        except DataError as error:
            return str(error)
    files = sorted((tmp / f"run_{name}").glob("rollouts/*.jsonl"))
    return jsonl.read(tmp / f"run_{name}/metrics.jsonl"), [jsonl.read(file) for file in files]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("own_verifier")
    for name, rows in {"train": ROWS, "refused": [*ROWS, {"prompt": "w7", "answer": "7"}]}.items():
        jsonl.write(tmp / f"{name}.jsonl", rows)
    write_tiny_model(tmp / "hf", last=ANSWERS, **MODEL)
    return tmp


def expected(group, response):
    """(status, score, reward, note) by hand."""
    (row,) = [row for row in ROWS if row["prompt"] == group["prompt"]]
    off = abs(int(response["text"][-1]) - int(row["answer"]))
    if row.get("verifier") == "math":
        return ("wrong" if off else "correct"), None, float(not off), None
    is_right, score = off <= row["tolerance"], 1 / (1 + off)
    return ("correct" if is_right else "wrong"), score, score, f"{off} off"


def test_a_run_is_judged_by_the_object_that_it_is_given(workers, place):
    ((rows, steps),) = workers.run(1, fit, place, "train")
    assert len(rows) == 1 + len(steps) == 3
    for row, groups in zip(rows[1:], steps, strict=True):
        found, by_hand = [], []
        for group in groups:
            for r in group["responses"]:
                found.append((r["status"], r.get("score"), r["reward"], r.get("note")))
                by_hand.append(expected(group, r))
        assert found == by_hand and len(found) == NUM_RESPONSES
        assert {status for status, *_ in found} == {"correct", "wrong"}
        assert len({reward for _, _, reward, _ in found}) > 3, "dense"
        right = sum(status == "correct" for status, *_ in found)
        assert row["reward/correct_fraction"] == right / NUM_RESPONSES
        mean = sum(reward for _, _, reward, _ in found) / NUM_RESPONSES
        assert row["reward/mean"] == pytest.approx(mean)
        # Its own metric, of those that it judges.
        offs = [r["metrics"]["off"] for g in groups for r in g["responses"] if "metrics" in r]
        assert len(offs) == NUM_RESPONSES * 3 / 4
        assert row["reward/own/off"] == pytest.approx(sum(offs) / len(offs))
        # Its class is its name; the row that names another verifier has that one.
        assert row["reward/by_verifier/Near/share"] == 3 / 4
        assert row["reward/by_verifier/math/share"] == 1 / 4
        assert row["actor/grad_norm"] > 0 and row["reward/failed_fraction"] == 0
    for row in (rows[0], rows[-1]):
        # Of three answers to problems 0 and 2 one is 7, of those to 1 and 3 two. So right are one 7
        # for 7, two for 6 with a tolerance of 1, none for 9, and one 8 for 8.
        assert row["evaluation/avg@3"] == pytest.approx((1 + 2 + 0 + 1) / 12)
        assert row["evaluation/by_verifier/Near/avg@3"] == pytest.approx((1 + 2 + 0) / 9)


def test_its_check_refuses_a_row_before_anything_is_sampled(workers, place):
    (told,) = workers.run(1, fit, place, "refused")
    assert "refused.jsonl: row 4 (from 0) is refused by the verifier given to VapoTrainer" in told
    assert "has no column tolerance" in told and not (place / "run_refused/metrics.jsonl").exists()

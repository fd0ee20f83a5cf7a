"""Names, metrics.jsonl, TensorBoard events, rollouts/step_*.jsonl, and their resume.

Not exercised: which process writes, and the numbers themselves (the trainer's tests).
"""

import json
import math
import os

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import jsonl
from tests.run.checkpoint.test_writer import limited
from vapo_megatron.config.metrics import METRICS, accuracy_name, describe
from vapo_megatron.config.phases import Span
from vapo_megatron.data.rollout import Prompt, Rollout, ScoredRollout
from vapo_megatron.errors import DataError, UserError
from vapo_megatron.run.directory import read_run
from vapo_megatron.run.metrics import MetricsWriter
from vapo_megatron.run.token_records import group_records

REQUIRED = """
reward/mean rollout/response_length_mean rollout/truncated_fraction rollout/logprob_diff_mean
rollout/logprob_diff_max actor/loss actor/positive_lm_loss actor/entropy actor/approx_kl
actor/clip_fraction_low actor/clip_fraction_high actor/grad_norm critic/loss
critic/explained_variance critic/grad_norm algorithm/lambda_actor_mean tokens_per_second
evaluation/avg@32 evaluation/pass@8 evaluation/majority@8 time/generation_seconds time/step_seconds
""".split()


def lines(run_dir):
    return jsonl.read(run_dir / "metrics.jsonl")


def test_the_promised_names_are_described():
    for name in REQUIRED:
        assert describe(name).description.endswith("."), name


def test_other_names_are_unknown():
    for name in (
        "reward/Mean",
        "evaluation/avg@0",
        "evaluation/avg@",
        "time/lunch_seconds",
        "memory/lunch_peak_bytes",
        "step",
    ):
        assert describe(name) is None
    assert {describe(name).unit for name in METRICS if name.startswith("time/")} == {"s"}


def test_rows_are_one_object_a_line_step_first_and_on_disk_at_once(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def seen(file):
        synced.append(os.readlink(f"/proc/self/fd/{file}").split("/")[-1])
        fsync(file)

    writer = MetricsWriter(tmp_path / "deep" / "run", tensorboard=False)
    monkeypatch.setattr(os, "fsync", seen)
    writer.write(0, {"evaluation/avg@8": 0.25})
    row = writer.write(1, {"reward/mean": torch.tensor(0.5), "critic/loss": 2})
    assert list(row.items()) == [("step", 1), ("reward/mean", 0.5), ("critic/loss", 2)]
    # The writer is still open.
    text = (tmp_path / "deep" / "run" / "metrics.jsonl").read_text()
    assert text == (
        '{"step": 0, "evaluation/avg@8": 0.25}\n{"step": 1, "reward/mean": 0.5, "critic/loss": 2}\n'
    )
    for held_out in (False, True):
        writer.write_problems(1, [0], [1], [2], held_out=held_out)
    assert synced == ["metrics.jsonl", "metrics.jsonl", "problems.jsonl", "held_out.jsonl"]
    writer.close()
    writer.close()


def test_what_is_not_finite_becomes_null(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"critic/loss": math.nan, "actor/loss": torch.tensor(-math.inf)})
    assert lines(tmp_path) == [{"step": 1, "critic/loss": None, "actor/loss": None}]


def test_unknown_names_and_steps_out_of_order_are_bugs(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=3) as writer:
        with pytest.raises(AssertionError, match="reward/meen.*config/metrics.py"):
            writer.write(3, {"reward/meen": 1.0})
        with pytest.raises(AssertionError, match="row 2 after row 2"):
            writer.write(2, {})
        writer.write(3, {})
        with pytest.raises(AssertionError, match="row 3 after row 3"):
            writer.write(3, {})
    assert lines(tmp_path) == [{"step": 3}]


GROUP = {"prompt": "p", "answer": "1", "responses": []}


def test_resume_drops_later_rows_and_rollouts(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(5):
            writer.write(step, {"reward/mean": step / 2})
            writer.write_rollouts(step, [{**GROUP, "policy_version": step}])
    replay = tmp_path / "rollouts" / "step_000004.rank_0.pt"
    replay.write_bytes(b"binary")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    # A checkpoint of step 2 was loaded: 3 runs next.
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=3) as writer:
        assert [row["step"] for row in lines(tmp_path)] == [0, 1, 2]
        writer.write(3, {"reward/mean": 9.0})
    assert [row["reward/mean"] for row in lines(tmp_path)] == [0.0, 0.5, 1.0, 9.0]
    run = read_run(tmp_path)
    assert run.rollout_steps == [0, 1, 2]
    assert run.rollouts(2) == [{**GROUP, "policy_version": 2}]
    assert replay.exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_row_that_waits_for_its_evaluation_is_written_once(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in (0, 1, 2):
            writer.write_problems(step, [step], [1], [1])
            writer.write(step, {"actor/loss": float(step)})
    # Resumed after step 2, whose row was written by a run that was killed before its next save.
    with MetricsWriter(tmp_path, False, 3, True) as writer:
        writer.write(2, {"actor/loss": 5.0})
        writer.write(3, {})
    rows = jsonl.read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and rows[2]["actor/loss"] == 5.0
    problems = (tmp_path / "problems.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in problems] == [0, 1, 2], "its problems stay"


def test_the_timeline_has_a_row_a_step_that_a_resume_writes_again(tmp_path):
    spans = {"trainer": [Span("values", 1, 5.0, 6.5)], "sampler": []}
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in (1, 2):
            writer.write_timeline(step, spans)
    with MetricsWriter(tmp_path, False, 2) as writer:
        writer.write_timeline(2, {"trainer": [], "sampler": []})
    rows = jsonl.read(tmp_path / "timeline.jsonl")
    assert rows == [
        {"step": 1, "trainer": [["values", 1, 5.0, 6.5]], "sampler": []},
        {"step": 2, "trainer": [], "sampler": []},
    ]


def test_a_run_from_the_beginning_drops_all_rows(tmp_path):
    for _ in range(2):
        with MetricsWriter(tmp_path, tensorboard=False) as writer:
            writer.write(0, {})
            writer.write(1, {})
    assert [row["step"] for row in lines(tmp_path)] == [0, 1]


def test_tensorboard_shows_the_rows_and_purges_on_resume(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(4):
            writer.write(step, {"reward/mean": float(step), "critic/loss": math.nan})
    with MetricsWriter(tmp_path, resume_step=2) as writer:
        writer.write(2, {"reward/mean": 20.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    points = [(e.step, e.value) for e in events.Scalars("reward/mean")]
    assert points == [(0, 0.0), (1, 1.0), (2, 20.0)]


def test_accuracy_name():
    assert accuracy_name({"step": 1, "evaluation/avg@16": 0.5}) == "evaluation/avg@16"
    assert accuracy_name({"evaluation/response_length_mean": 3.0}) is None


def test_rollouts_are_written_for_people(tmp_path):
    prompt = Prompt(7, "1+1=", (1, 2), "2")
    right = Rollout(prompt, 0, 14, (5, 6), (-0.5, -0.1), False, 3)
    wrong = Rollout(prompt, 1, 15, (5, 6, 7), (-0.5, -0.1, -0.2), True, 3)
    scored = [
        ScoredRollout(right, "two \u00e9\n", "correct", 1.0),
        ScoredRollout(wrong, "three", "wrong", -1.0),
    ]
    (group,) = group_records(scored, {}, None)
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write_rollouts(12, [group, group])
    text = (tmp_path / "rollouts" / "step_000012.jsonl").read_text()
    assert len(text.splitlines()) == 2
    responses = [
        {"sample": 0, "status": "correct", "reward": 1.0, "num_tokens": 2, "truncated": False,
         "text": "two \u00e9\n"},
        {"sample": 1, "status": "wrong", "reward": -1.0, "num_tokens": 3, "truncated": True,
         "text": "three"},
    ]  # fmt: skip
    expected = {"prompt_index": 7, "prompt": "1+1=", "answer": "2", "policy_version": 3}
    assert read_run_of_rollouts(tmp_path) == [{**expected, "responses": responses}] * 2


def read_run_of_rollouts(run_dir):
    (run_dir / "config.yaml").write_text("seed: 0\n")
    run = read_run(run_dir)
    assert run.config == {"seed": 0} and run.rows == [] and run.rollout_steps == [12]
    return run.rollouts(12)


WRITES = {
    "metrics.jsonl": lambda writer: writer.write(1, {}),
    "tensorboard": lambda writer: writer.write(1, {"critic/loss": 0.5}),
    "problems.jsonl": lambda writer: writer.write_problems(1, [0], [1], [1]),
    "held_out.jsonl": lambda writer: writer.write_problems(1, [0], [1], [1], held_out=True),
    "rollouts/step_000001.jsonl": lambda writer: writer.write_rollouts(1, [{"text": "x" * 99}]),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", WRITES)
def test_a_full_disk_is_told_with_the_file_and_the_remedy(tmp_path, name):
    """Here no file may grow beyond some bytes."""
    writer = MetricsWriter(tmp_path, tensorboard=name == "tensorboard")
    with pytest.raises(UserError) as error, limited(40 if name == "tensorboard" else 1), writer:
        WRITES[name](writer)
    words = str(error.value)
    assert words.startswith(
        f"{tmp_path / name} cannot be written: File too large; raise the limit on"
    )
    assert "from its latest checkpoint" in words
    assert not list(tmp_path.rglob(".*")), "what could not be finished is gone"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.jsonl", '{"step": 0}\nnonsense\n', "line 2 is not JSON"),
        ("metrics.jsonl", '{"step": 0}\n[1]\n', "line 2 is not a JSON object"),
        ("metrics.jsonl", '{"loss": 0}\n', 'line 1 has no whole number "step"'),
        ("config.yaml", "a: [\n", "config.yaml cannot be read"),
        ("config.yaml", "[1]\n", "must hold sections, found list"),
    ],
)
def test_broken_files_are_named(tmp_path, file, text, message):
    (tmp_path / file).write_text(text)
    with pytest.raises(DataError, match=message) as error:
        read_run(tmp_path)
    assert str(tmp_path / file) in str(error.value) and "\n" not in str(error.value)

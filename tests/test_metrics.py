"""Names, phase timer, metrics.jsonl, TensorBoard events, rollouts/step_*.jsonl, and their resume.

Not exercised: which process writes, and the numbers themselves (the trainer's tests).
"""

import json
import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vapo_megatron.batch import Prompt, Rollout
from vapo_megatron.errors import DataError
from vapo_megatron.metrics import (
    METRICS,
    PHASES,
    MetricsWriter,
    PhaseTimer,
    accuracy_name,
    describe,
    group_record,
    read_run,
    tokens_per_second,
)

REQUIRED = """
reward/mean rollout/response_length_mean rollout/truncated_fraction rollout/logprob_diff_mean
rollout/logprob_diff_max actor/loss actor/positive_lm_loss actor/entropy actor/approx_kl
actor/clip_fraction_low actor/clip_fraction_high actor/grad_norm critic/loss
critic/explained_variance critic/grad_norm algorithm/lambda_actor_mean tokens_per_second
evaluation/avg@32 evaluation/pass@8 evaluation/majority@8 time/generation_seconds time/step_seconds
""".split()


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", REQUIRED)
def test_the_promised_names_are_described(name):
    assert describe(name).description.endswith(".")


def test_other_names_are_unknown():
    for name in (
        "reward/Mean",
        "evaluation/avg@0",
        "evaluation/avg@",
        "time/lunch_seconds",
        "step",
    ):
        assert describe(name) is None
    assert {describe(name).unit for name in METRICS if name.startswith("time/")} == {"s"}


def test_rows_are_one_object_a_line_step_first_and_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path / "deep" / "run", tensorboard=False)
    writer.write(0, {"evaluation/avg@8": 0.25})
    row = writer.write(1, {"reward/mean": torch.tensor(0.5), "critic/loss": 2})
    assert list(row.items()) == [("step", 1), ("reward/mean", 0.5), ("critic/loss", 2)]
    # The writer is still open.
    text = (tmp_path / "deep" / "run" / "metrics.jsonl").read_text()
    assert text == (
        '{"step": 0, "evaluation/avg@8": 0.25}\n{"step": 1, "reward/mean": 0.5, "critic/loss": 2}\n'
    )
    writer.close()
    writer.close()


def test_what_is_not_finite_becomes_null(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"critic/loss": math.nan, "actor/loss": torch.tensor(-math.inf)})
    assert lines(tmp_path) == [{"step": 1, "critic/loss": None, "actor/loss": None}]


def test_unknown_names_and_steps_out_of_order_are_bugs(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False, resume_step=3) as writer:
        with pytest.raises(AssertionError, match="reward/meen.*metrics.METRICS"):
            writer.write(3, {"reward/meen": 1.0})
        with pytest.raises(AssertionError, match="row 2 after row 2"):
            writer.write(2, {})
        writer.write(3, {})
        with pytest.raises(AssertionError, match="row 3 after row 3"):
            writer.write(3, {})
    assert lines(tmp_path) == [{"step": 3}]


def test_resume_drops_later_rows_and_rollouts(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(5):
            writer.write(step, {"reward/mean": step / 2})
            writer.write_rollouts(step, [{"step": step}])
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
    assert run.rollout_steps == [0, 1, 2] and run.rollouts(2) == [{"step": 2}]
    assert replay.exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


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


class Clock:
    """time.perf_counter that moves when told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("vapo_megatron.metrics.time.perf_counter", lambda: self.now)


def test_phases_accumulate_and_start_over_with_each_step(monkeypatch):
    clock, started = Clock(monkeypatch), []
    timer = PhaseTimer(on_start=started.append)
    for phase, seconds in (("critic_update", 2.0), ("generation", 1.0), ("critic_update", 3.0)):
        with timer(phase):
            clock.now += seconds
        clock.now += 0.5
    times = timer.take()
    # 2 + 3 and 1 in phases, 3 x 0.5 between them.
    assert list(times.items()) == [
        ("time/generation_seconds", 1.0),
        ("time/critic_update_seconds", 5.0),
        ("time/step_seconds", 7.5),
    ]
    assert started == ["critic_update", "generation", "critic_update"]
    clock.now += 0.25
    assert timer.take() == {"time/step_seconds": 0.25}


def test_a_phase_inside_another_counts_to_the_outer_one(monkeypatch):
    clock, started = Clock(monkeypatch), []
    timer = PhaseTimer(on_start=started.append)
    with timer("evaluation"):
        with timer("generation"):
            clock.now += 4.0
        clock.now += 1.0
    assert timer.take() == {"time/evaluation_seconds": 5.0, "time/step_seconds": 5.0}
    assert started == ["evaluation"]


def test_a_phase_waits_for_the_accelerator_and_survives_an_error(monkeypatch):
    clock = Clock(monkeypatch)

    def synchronize():
        clock.now += 10.0

    timer = PhaseTimer(synchronize=synchronize)
    with timer("sync"):
        clock.now += 1.0
    with pytest.raises(KeyError), timer("values"):
        raise KeyError
    with timer("reward"):
        pass
    assert timer.take() == {
        "time/reward_seconds": 10.0,
        "time/values_seconds": 0.0,
        "time/sync_seconds": 11.0,
        "time/step_seconds": 21.0,
    }


def test_unknown_phases_are_bugs():
    with pytest.raises(AssertionError, match="lunch"), PhaseTimer()("lunch"):
        pass
    assert all(describe(f"time/{phase}_seconds") for phase in PHASES)


def test_tokens_per_second_leaves_evaluation_and_checkpoint_out():
    times = {"time/evaluation_seconds": 5.0, "time/checkpoint_seconds": 1.0}
    # 800 / (10 - 5 - 1), 800 / 10.
    assert tokens_per_second(800, {**times, "time/step_seconds": 10.0}) == 200.0
    assert tokens_per_second(800, {"time/step_seconds": 10.0}) == 80.0
    assert math.isnan(tokens_per_second(800, {"time/step_seconds": 0.0}))


def test_accuracy_name():
    assert accuracy_name({"step": 1, "evaluation/avg@16": 0.5}) == "evaluation/avg@16"
    assert accuracy_name({"evaluation/response_length_mean": 3.0}) is None


def test_rollouts_are_written_for_people(tmp_path):
    prompt = Prompt(7, "1+1=", (1, 2), "2")
    rollouts = [
        Rollout(prompt, 0, 14, (5, 6), (-0.5, -0.1), False, "two \u00e9\n", 3),
        Rollout(prompt, 1, 15, (5, 6, 7), (-0.5, -0.1, -0.2), True, "three", 3),
    ]
    group = group_record(rollouts, ["correct", "wrong"], [1.0, -1.0])
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

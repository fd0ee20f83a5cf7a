"""What a checkpoint keeps of a run besides its models, and what a resume makes of it.

Whole trainers in one process, on dumped responses or on those of a given source. Not exercised:
several ranks (tests/test_trainer_wiring.py), vLLM.
"""

import json

import pytest

from tests import jsonl
from tests.dumped import MODEL, dump, rollouts
from tests.weights.tiny_hf import write_tiny_hf
from tests.whole_run import Given, settings, trainer
from vapo_megatron.errors import UserError
from vapo_megatron.weights.convert.to_hf import convert_to_hf


def fit(hf, tmp, value_range=None, lora=()):
    """Train on what was dumped, or go on; what refuses it, or the state of its checkpoint."""
    given = settings(
        hf,
        tmp / "run",
        model={"lora": dict(lora)},
        algorithm={"policy_steps": 2, "value_range": value_range},
        checkpoint={"hf_export": False, "every_steps": 1, "keep_last": 9},
    )
    try:
        with trainer(given, tmp) as made:
            made.fit()
    except UserError as error:
        return str(error)
    (file,) = (tmp / "run/checkpoints").glob("step_000002/state.json")
    return json.loads(file.read_text())["run"]


def test_a_critic_of_another_value_range_is_refused(workers, tmp_path):
    hf = write_tiny_hf(tmp_path / "hf", **MODEL)
    workers.run(1, dump, tmp_path / "replay", [1, 2], 1)
    (state,) = workers.run(1, fit, hf, tmp_path, [-2.0, 2.0])
    assert state["value_range"] == [-2.0, 2.0]
    assert state["policy_version"] == 2 and state["unevaluated"] is None
    for other in ([-1.0, 1.0], None):
        (said,) = workers.run(1, fit, hf, tmp_path, other)
        assert "its critic was trained with algorithm.value_range=[-2.0, 2.0]" in said
    assert workers.run(1, fit, hf, tmp_path, [-2.0, 2.0]) == [state]


def test_adapters_are_loaded_only_where_they_compute_the_same(workers, tmp_path):
    hf = write_tiny_hf(tmp_path / "hf", **MODEL)
    workers.run(1, dump, tmp_path / "replay", [1, 2], 1)
    of_two = {"rank": 2, "targets": ["q_proj", "o_proj"]}
    (state,) = workers.run(1, fit, hf, tmp_path, None, of_two)
    ordered = {"rank": 2, "targets": ["o_proj", "q_proj"]}
    assert workers.run(1, fit, hf, tmp_path, None, ordered) == [state]
    for name, held, other in (
        ("alpha", "32.0", {"alpha": 16}),
        ("targets", '["q_proj", "o_proj"]', {"targets": ["q_proj"]}),
    ):
        (said,) = workers.run(1, fit, hf, tmp_path, None, of_two | other)
        assert f"of its actor were trained with model.lora.{name}={held}, which model." in said
        assert f"; set {name}={held}, or use another checkpoint" in said
    checkpoint = tmp_path / "run/checkpoints/step_000002/actor"
    convert_to_hf(checkpoint, tmp_path / "converted", hf)
    other = write_tiny_hf(tmp_path / "other", **MODEL, seed=1)
    with pytest.raises(UserError, match="--hf=.*other has other weights than those that the ad"):
        convert_to_hf(checkpoint, tmp_path / "wrong", other)
    assert not (tmp_path / "wrong").exists()


def skipping(hf, tmp, is_resumed):
    """Skipped updates in a row of both roles, and what else there is after two steps."""
    given = settings(
        hf,
        tmp / "run",
        algorithm={"policy_steps": 1, "value_pretraining_steps": 1},
        checkpoint={"hf_export": False, "every_steps": 1, "keep_last": 9},
    )
    with trainer(given, tmp) as made:
        train_step = made.train_step

        def skipped(step):
            found = train_step(step)
            made.actor.trained.skipped_in_a_row, made.critic.trained.skipped_in_a_row = 2, 3
            return found

        made.train_step = skipped
        done = made._resume() if is_resumed else made.fit()
        return (
            done, made.actor.trained.skipped_in_a_row, made.critic.trained.skipped_in_a_row,
            made.policy_version, made.explained_variances, made._saved,
        )  # fmt: skip


def test_a_resume_has_what_the_checkpoint_says_of_the_run(workers, tmp_path):
    hf = write_tiny_hf(tmp_path / "hf", **MODEL)
    workers.run(1, dump, tmp_path / "replay", [1, 2], 1)
    ((_, *before),) = workers.run(1, skipping, hf, tmp_path, False)
    assert before == [2, 3, 1, [], 2]
    assert workers.run(1, skipping, hf, tmp_path, True) == [(2, *before)]


class InFlight(Given):
    """Has responses in flight, which take all the time that there is."""

    def finish_in_flight(self, done, has_time):
        self.asked.append((done, has_time()))
        return has_time()


def signalled(hf, tmp, grace):
    """Stop after the first step; (what was asked of the source, the saved steps)."""
    given = settings(
        hf,
        tmp / f"grace_{grace}",
        algorithm={"policy_steps": 3},
        checkpoint={"hf_export": False, "every_steps": 5, "grace_seconds": grace},
    )
    source = InFlight(lambda asked: rollouts(1))
    source.asked = []
    with trainer(given, source=lambda trainer: source) as made:
        train_step = made.train_step

        def then_signalled(step):
            found = train_step(step)
            made.early_stop.poll = lambda: "SIGTERM"
            return found

        made.train_step = then_signalled
        made.fit()
    rows = jsonl.read(tmp / f"grace_{grace}/metrics.jsonl")
    checkpoints = sorted(p.name for p in (tmp / f"grace_{grace}/checkpoints").glob("step_*"))
    return source.asked, checkpoints, len(rows)


def test_without_time_for_what_is_in_flight_nothing_is_saved(workers, tmp_path):
    hf = write_tiny_hf(tmp_path / "hf", **MODEL)
    assert workers.run(1, signalled, hf, tmp_path, 600.0) == [([(1, True)], ["step_000001"], 2)]
    assert workers.run(1, signalled, hf, tmp_path, 1e-6) == [([(1, False)], [], 2)]


def first_step(hf, tmp, behaviour):
    given = settings(hf, tmp / behaviour, rollout={"behaviour": behaviour})
    with trainer(given, tmp) as made:
        data = made.prepare(0)
        return data.metrics, data.batch.old_logprobs.tolist(), data.batch.rollout_logprobs.tolist()


@pytest.mark.parametrize("behaviour", ["recomputed", "sampler"])
def test_the_samplers_difference_is_to_what_the_trainer_computes(workers, tmp_path, behaviour):
    """Whichever of the two the ratio is to."""
    hf = write_tiny_hf(tmp_path / "hf", **MODEL)
    workers.run(1, dump, tmp_path / "replay", [1], 1)
    ((metrics, old, sampled),) = workers.run(1, first_step, hf, tmp_path, behaviour)
    ((_, computed, _),) = workers.run(1, first_step, hf, tmp_path, "recomputed")
    apart = [abs(a - b) for a, b in zip(computed, sampled, strict=True)]
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(sum(apart) / len(apart))
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(max(apart)) and max(apart) > 1
    assert old == (sampled if behaviour == "sampler" else computed)

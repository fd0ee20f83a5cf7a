"""Steps with odd responses, through the whole trainer: replayed, in real processes.

Numbers that are not finite, no correct response or only correct ones, empty ones, none with an end.
What a sampler leaves out is in tests/rollout/test_dynamic_sampling.py, how ranks agree to skip an
update in tests/run/test_skipped_updates.py, prompts over the limit in tests/data/test_prompts.py.
Not exercised: vLLM, whose responses are never empty.
"""

import dataclasses
import math
import shutil
from array import array

import pytest

from tests.dumped import MODEL, NUM_RESPONSES, rollouts, write
from tests.weights.tiny_hf import write_tiny_hf
from tests.whole_run import measured, settings, trainer
from vapo_megatron.rollout.dump import held_steps, read_file, read_headers

TP2 = {"world_size": 2, "tensor_model_parallel_size": 2}
DP2 = {"world_size": 2}


def odd(kind):
    """A step's responses of one kind."""

    def changed(item, status="wrong", reward=-1.0, text=None, **fields):
        rollout = dataclasses.replace(item.rollout, **fields)
        text = item.text if text is None else text
        return dataclasses.replace(item, rollout=rollout, text=text, status=status, reward=reward)

    found = []
    for item in rollouts():
        r = item.rollout
        logprobs = array("f", [*r.logprobs[:-1], math.nan])
        nothing = {
            "token_ids": array("i"), "logprobs": array("f"), "text": "", "truncated": True,
        }  # fmt: skip
        if kind == "correct":
            item = changed(item, "correct", 1.0)
        elif kind == "wrong":
            item = changed(item)
        elif kind == "cut off":
            item = changed(item, truncated=True)
        elif kind == "empty" or (kind == "some empty" and r.position in (2, 4, 5, 6, 7)):
            item = changed(item, **nothing)
        elif kind == "not finite" or (kind == "one not finite" and r.position == 5):
            item = dataclasses.replace(item, rollout=dataclasses.replace(r, logprobs=logprobs))
        found.append(item)
    return found


def write_kinds(root, kinds):
    """A worker's function."""
    for step, kind in enumerate(kinds, 1):
        write(root, odd(kind), step)


def fit(hf, dumped, run_dir, steps, every_steps, parallel, algorithm):
    """A run; what it was stopped by, and how many updates each role has had; a worker's."""
    from vapo_megatron.roles.trained import UpdatesSkipped

    given = settings(
        hf,
        run_dir,
        algorithm={"policy_steps": steps, **algorithm},
        parallel=parallel,
        # What is not finite is no difference that stops a run.
        rollout={"max_logprob_difference": 1e4},
        checkpoint={"every_steps": every_steps, "keep_last": 99, "hf_export": False},
    )
    with trainer(given, dumped) as made:
        try:
            made.fit()
        except UpdatesSkipped as error:
            return str(error), {}
        return "", {role: model.num_updates for role, model in made._models.items()}


@pytest.fixture
def run(workers, tmp_path):
    """run(name, dumped, steps, ...) -> its rows without times, and what fit returned."""
    hf = write_tiny_hf(tmp_path / "hf", **MODEL)

    def of(name, dumped, steps, parallel=TP2, every_steps=1, **algorithm):
        if isinstance(dumped, list):
            workers.run(1, write_kinds, tmp_path / name / "given", dumped)
            dumped = tmp_path / name / "given"
        root = tmp_path / name
        given = (hf, dumped, root, steps, every_steps, parallel, algorithm)
        first, second = workers.run(2, fit, *given)
        assert first == second, "every rank sees the same"
        return root, [row for row in measured(root) if row["step"]], *first

    return of


def skipped(rows, role):
    return [row[f"{role}/skipped_updates"] for row in rows]


def nulls(row):
    return [name for name, value in row.items() if value is None]


DIFFERENCES = ["rollout/logprob_diff_mean", "rollout/logprob_diff_max"]
NORMS = ["critic/grad_norm", "actor/grad_norm"]


def test_steps_that_are_not_finite_are_kept_until_the_run_stops(run):
    kinds = ["one not finite", "plain", "not finite", "not finite"]
    root, rows, stopped, _ = run("run", kinds, 4, every_steps=0)
    assert skipped(rows, "actor") == skipped(rows, "critic") == [1, 0, 2]
    assert [nulls(row) for row in rows] == [DIFFERENCES, [], DIFFERENCES + NORMS]
    assert "step 4: 3 updates of the critic in a row were skipped" in stopped
    assert "optimizer.max_skipped_updates" in stopped and str(root / "skipped") in stopped
    assert held_steps(root / "skipped") == [1, 3, 4]
    for step in (1, 3, 4):
        ((file, _),) = read_headers(root / "skipped", step)
        assert repr(read_file(file)) == repr(odd(kinds[step - 1]))


def test_updates_that_were_skipped_count_after_a_restart(run):
    kinds = ["plain", "not finite", "not finite"]
    root, rows, stopped, _ = run("run", kinds, 2, every_steps=0)
    assert not stopped and skipped(rows, "critic") == [0, 2]
    *_, stopped, _ = run("run", root / "given", 3, every_steps=0)
    assert "step 3: 3 updates of the critic in a row were skipped" in stopped


@pytest.mark.slow
def test_such_a_step_can_be_made_again_and_counts_after_a_restart(run, tmp_path):
    kinds = ["plain", "one not finite", "plain", "not finite", "not finite"]
    root, rows, stopped, updates = run("run", kinds, 4)
    assert not stopped and updates == {"actor": 5, "critic": 5}

    # From the checkpoint before it, the step makes the same of what was kept.
    before = tmp_path / "again/checkpoints/step_000001"
    shutil.copytree(root / "checkpoints/step_000001", before)
    (before.parent / "latest").write_text(before.name)
    again, (same,), *_ = run("again", root / "skipped", 2)
    assert same == rows[1] and skipped([same], "actor") == [1]
    parts = [p.relative_to(root) for p in root.glob("checkpoints/step_000002/*/*.distcp")]
    assert len(parts) == 4
    for part in parts:
        assert (again / part).read_bytes() == (root / part).read_bytes(), part

    # Two in a row have been skipped: the next one is the third.
    _, rows, stopped, _ = run("run", root / "given", 5)
    assert "step 5: 3 updates of the critic in a row were skipped" in stopped
    assert len(rows) == 4 and held_steps(root / "skipped") == [2, 4, 5]


def test_odd_responses_are_trained_on(run):
    kinds = ["correct", "wrong", "cut off", "some empty", "empty"]
    _, rows, stopped, updates = run("run", kinds, len(kinds), every_steps=0)
    assert not stopped and updates == {"actor": 10, "critic": 10}
    assert [nulls(row) for row in rows] == [[]] * len(kinds)
    correct, wrong, cut_off, some_empty, empty = rows
    assert correct["reward/correct_fraction"] == 1 and correct["actor/positive_lm_loss"] > 0
    for row in (wrong, cut_off):
        assert row["reward/correct_fraction"] == 0 and "actor/positive_lm_loss" not in row
    assert cut_off["rollout/truncated_fraction"] == 1
    for row in rows[:4]:
        assert row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0
    lengths = [len(item.rollout.token_ids) for item in odd("some empty")]
    mean = some_empty["rollout/response_length_mean"]
    assert mean == pytest.approx(sum(lengths) / NUM_RESPONSES) and 0 in lengths
    for name in ("rollout/response_length_max", "actor/grad_norm", "critic/grad_norm"):
        assert empty[name] == 0, "there is nothing to learn from"


def test_groups_without_a_difference_teach_nothing(run):
    """Without a critic, over data-parallel ranks; what was cut off is left out of the loss."""
    kinds = ["correct", "wrong", "cut off", "some empty"]
    algorithm = {"advantage_estimator": "grpo", "positive_lm_coef": 0, "overlong_filtering": True}
    _, rows, stopped, updates = run("run", kinds, len(kinds), DP2, 0, **algorithm)
    assert not stopped and updates == {"actor": 8}
    assert [nulls(row) for row in rows] == [[]] * len(kinds)
    for row in rows[:3]:
        assert row["actor/loss"] == row["actor/grad_norm"] == 0
    # The groups with some empty responses keep their other rewards.
    assert rows[3]["actor/grad_norm"] > 0

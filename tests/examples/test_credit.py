"""The credit example's jobs, sweeps, tables, charts and page, from made-up runs.

The runner of the jobs is in test_runner.py. Not exercised but by the slow test: training
itself. What the arms show is for examples/run_credit_tiny.sh to say.
"""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from tests.examples.tiny import done, write_lines

# isort: split
from credit import keys, page, results, sweeps
from credit import main as credit
from credit.arms import MAIN
from credit.results import Result
from credit.sweeps import SWEEPS, run_name
from runner import command
from runner.arms import Arm
from runner.jobs import write_state


def write_run(directory, responses, group_size, rows):
    algorithm = {"responses_per_step": responses, "group_size": group_size}
    write_lines(directory / "config.yaml", [{"algorithm": algorithm}])
    write_lines(directory / "metrics.jsonl", rows)
    write_lines(directory / "credit.jsonl", [])


def test_value_pretraining_and_dropped_groups_are_counted(tmp_path):
    write_run(tmp_path / "value", 100, 4, [{"step": 1}, {"step": 2}])
    rows = [
        {"step": 0, "evaluation/avg@2": 0.1},
        {"step": 1, "rollout/groups_sampled": 5},
        {"step": 2, "rollout/groups_sampled": 8, "evaluation/avg@2": 0.5},
    ]
    write_run(tmp_path / "dapo", 16, 4, rows)
    found = results.read_result(tmp_path / "dapo", None)
    assert found.by_step == [(0, 0.1), (2, 0.5)]
    # Groups of 4: 20 and 32 responses.
    assert found.by_responses == [(0, 0.1), (52, 0.5)]
    rows = [{k: v for k, v in row.items() if "groups" not in k} for row in rows]
    write_run(tmp_path / "vapo", 16, 4, rows)
    found = results.read_result(tmp_path / "vapo", tmp_path / "value")
    assert found.by_responses == [(200, 0.1), (232, 0.5)]


def test_the_last_evaluation_by_number_of_locks(tmp_path):
    prompts = [keys.Problem(3, (7,) * locks).prompt for locks in (5, 9, 10, 20)]
    tests = tmp_path / "test.jsonl"
    write_lines(tests, [{"prompt": prompt} for prompt in prompts])
    runs = {}
    for name, correct in (("vapo", [2, 1, 2, 1]), ("dapo", [2, 2, 1, 0])):
        write_run(tmp_path / name, 16, 4, [{"step": 0, "evaluation/avg@2": 0.1}])
        config = {"algorithm": {"responses_per_step": 16}, "evaluation": {"path": str(tests)}}
        (tmp_path / name / "config.yaml").write_text(json.dumps(config))
        held_out = [
            {"step": step, "group_size": 2, "problems": [3, 2, 1, 0], "correct": found}
            for step, found in ((0, [0, 0, 0, 0]), (10, correct[::-1]))
        ]
        write_lines(tmp_path / name / "held_out.jsonl", held_out)
        runs[name] = {0: results.read_result(tmp_path / name, None)}
    assert sorted(runs["vapo"][0].by_locks) == [(5, 1.0), (9, 0.5), (10, 1.0), (20, 0.5)]
    lines = table("keys_mixed", "Held-out accuracy by number of locks", runs)
    # 5 and 9 locks: 1 and .5, and 1 and 1; 10 locks: 1 and .5; 20 locks: .5 and 0.
    assert lines[2] == "| VAPO | 0.750 | 1.000 | 0.500 |"
    assert "| 1.000 (+0.250, below in 0 of 1) | 0.500" in lines[3]
    assert lines[3].endswith("| 0.000 (-0.500, below in 1 of 1) |")
    assert lines[4] == "| None | - | - | - |"


def result(*accuracies, per_step=100.0, start=0.0, **of_credit):
    steps = [10.0 * i for i in range(len(accuracies))]
    row = {
        "key_correlation": None, "noise_ratio": None, "value_error": None, "good_keys": 0.5,
        "copied": 1.0, "best_explained_variance": 0.4, "value_bias_by_lock": None,
        "value_spread_by_lock": None, **of_credit,
    }  # fmt: skip
    return Result(
        by_step=list(zip(steps, accuracies)),
        by_responses=[(start + per_step * s, a) for s, a in zip(steps, accuracies)],
        rows=[{"step": s, "critic/explained_variance": 0.25} for s in range(1, 31)],
        credit=[{"step": s, **row} for s in range(1, 31)],
    )


ARMS = {"vapo": Arm("VAPO", "60"), "dapo": Arm("DAPO", "50"), "none": Arm("None", "")}


def table(form, heading, runs):
    """The lines of a form's table."""
    return results.tables(ARMS, runs, keys.FORMS[form])[heading].splitlines()


def test_the_tables_by_hand():
    runs = {
        "vapo": {0: result(0.1, 0.5, 0.7, 0.9, start=500), 1: result(0.1, 0.7, 0.9, 0.9)},
        "dapo": {0: result(0.1, 0.6, 0.7, 0.75), 1: result(0.1, 0.3, 0.4, 0.8)},
    }
    lines = table("keys", "Held-out accuracy by step", runs)
    # .5 and .7: mean .6, deviation .1 * sqrt(2) = .141
    assert lines[2].startswith("| VAPO | 0.600 +- 0.141 | 0.800 +- 0.141 | 0.900 +- 0.000 | 0.900")
    # .6 - .5 and .3 - .7: mean -.15, deviation .25 * sqrt(2) = .354
    assert "| 0.450 +- 0.212 (-0.150 +- 0.354, below in 1 of 2) |" in lines[3]
    assert lines[4] == "| None | - | - | - | - |  |"
    lines = table("keys", "Held-out accuracy by sampled responses", runs)
    # At 1000: .1 + .4 * 500 / 1000 = .3, and .7; .8 is reached at 500 + 2500 and at 1500.
    assert "| 0.500 +- 0.283 |" in lines[2] and "| 2250 +- 1061 |" in lines[2]
    assert "| 3000, never in 1 |" in lines[3]
    runs["dapo"][0] = result(0.1, 0.6, key_correlation=0.25, noise_ratio=1.0)
    lines = table("keys", "Credit", runs)
    assert "| 0.25 0.25 0.25 | 1.00 1.00 1.00 | - |" in lines[3]
    assert lines[2].endswith("| 0.25 0.25 0.25 | 0.40 0.40 0.40 |")
    counted = Result([], [], [], [{"step": s, "copied": s, "good_keys": None} for s in range(9)])
    assert results.mean_over(counted, "copied", 2, 5) == 3.5
    assert results.mean_over(counted, "good_keys", 2, 5) is None


def test_charts_and_pages_of_every_arm():
    runs = {"vapo": {0: result(0.1, 0.5, value_bias_by_lock=[0.1, 0.2])}, "dapo": {}}
    arms = {name: ARMS[name] for name in ("vapo", "dapo")}
    for drawn in (page.charts(arms, runs), page.by_lock(arms, runs, 1, 5)):
        ElementTree.fromstring(drawn)


def test_rare_keys_are_compared_by_the_step_at_which_they_are_chosen_half_of_the_time():
    def run(*chances):
        credit = [{"step": s, "chances": [c, 0.9, c / 2]} for s, c in enumerate(chances, 1)]
        return Result([], [], [], credit)

    # Kind 0 at step 2 and 3, kind 2, half as likely, a step later each.
    assert results.steps_to_half(run(0.0, 0.5, 1.0), [0, 2]) == 2.5
    assert results.steps_to_half(run(0.0, 0.25, 0.5, 1.0), [0, 2]) == 3.5
    assert results.steps_to_half(run(0.0, 0.5), [0, 2]) is None
    # Of the form, the kinds 0 and 3.
    rare = [{"step": s, "chances": [c, 0.9, 0.9, c]} for s, c in ((1, 0.0), (3, 0.5))]
    point = [(0, 0.1)]
    runs = {"vapo": {0: Result(point, point, [], rare[:1])}}
    runs["dapo"] = {0: Result(point, point, [], rare)}
    lines = table("keys_rare", "Good keys that are rare at first", runs)
    assert lines[2:4] == ["| VAPO | - | never |", "| DAPO | 3.0 | 3.0 |"]
    assert keys.FORMS["keys_rare"].rare_kinds == [0, 3] and not keys.FORMS["keys"].rare_kinds


def test_jobs_of_all_arms_share_what_belongs_to_a_seed(tmp_path):
    arms = {"keys": credit.arms_of("keys", quick=False)}
    jobs = credit.all_jobs(tmp_path, range(2), arms, ["algorithm.policy_steps=3"])
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    assert names[:4] == [f"keys/seed_0/{n}" for n in ("base", "data", "value", "vapo")]
    # The main arms of every seed come first.
    last_main = max(names.index(f"keys/seed_1/{n}") for n in MAIN)
    others = [n for n in arms["keys"] if n not in MAIN]
    assert all(last_main < names.index(f"keys/seed_0/{n}") for n in others)
    by_name = dict(zip(names, jobs))
    for name, arm in arms["keys"].items():
        job = by_name[f"keys/seed_1/{name}"]
        assert set(job.needs) <= set(names) and job.num_steps == 3
        has_value = "critic_checkpoint=null" not in str(arm.changes)
        assert ("keys/seed_1/value" in job.needs) == has_value
        assert ("--oracle" in job.command) == (name == "oracle")
    vapo, oracle = (by_name[f"keys/seed_0/{n}"] for n in ("vapo", "oracle"))
    differing = {k for k in oracle.settings if vapo.settings.get(k) != oracle.settings[k]}
    assert differing == {"options", "evaluation.every_steps"}, "VAPO is shown as a curve"
    # A changed trainer makes other runs.
    sources = {f"credit/{name}.py" for name in ("train", "measures", "values", "keys")}
    assert sources <= set(vapo.settings)
    value = by_name["keys/seed_0/value"]
    assert value.settings["algorithm.stage"] == "value_pretraining"


def test_quick_is_one_seed_and_three_arms_and_the_whole_has_every_form(tmp_path, monkeypatch):
    seen = {}

    def run_jobs(jobs, **_):
        seen["names"] = [job.name for job in jobs]
        return {}

    monkeypatch.setattr(command, "run_jobs", run_jobs)
    assert credit.main(["--quick", "--out", str(tmp_path)]) == 0
    assert [n.removeprefix("keys/seed_0/") for n in seen["names"]] == [
        "base", "data", "value", "vapo", "dapo", "grpo",
    ]  # fmt: skip
    assert credit.main(["--seeds", "0", "--out", str(tmp_path)]) == 2
    assert credit.main(["--seeds", "1", "--out", str(tmp_path)]) == 0
    assert {name.partition("/")[0] for name in seen["names"]} == set(credit.FORMS)
    # A form's tables are of its own runs.
    for job in credit.all_jobs(tmp_path, [0], {"keys": credit.arms_of("keys", quick=False)}, []):
        if job.out.name in ("value", "vapo"):
            write_run(job.out, 64, 8, [{"step": 0, "evaluation/avg@1": 0.25}])
            write_state(job, finished=True, seconds=1.0)
    assert credit.main(["--seeds", "1", "--out", str(tmp_path)]) == 0
    assert [path.parent.name for path in tmp_path.glob("*/table.md")] == ["keys"]
    assert "| VAPO | - | - | - | 0.250 | 60 |" in (tmp_path / "keys/table.md").read_text()


def swept_jobs(tmp_path):
    """The sweeps' jobs by name."""
    return {job.name: job for job in credit.all_jobs(tmp_path, range(1), sweeps.swept_arms(), [])}


def test_each_swept_run_changes_its_setting_alone(tmp_path):
    jobs, seen = swept_jobs(tmp_path), 0
    for key, sweep in SWEEPS.items():
        for form, arm in sweep.lines:
            own = jobs[f"{form}/seed_0/{arm}"].settings
            for label, changes in sweep.values.items():
                settings = jobs[f"{form}/seed_0/{run_name(arm, key, label)}"].settings
                differing = {name for name in own if own[name] != settings.get(name)}
                differing -= {"algorithm.policy_steps", "evaluation.every_steps"}
                assert differing == {change.partition("=")[0] for change in changes}
                if changes:
                    assert settings["algorithm.policy_steps"] == sweeps.STEP
                    seen += 1
    # Rates, groups and mini-batches of three arms, three values each; three and three of alpha.
    assert seen == 3 * 3 * 3 + 2 * 3 + 2


def test_the_forms_own_values_stand_at_their_place_on_the_axis(tmp_path):
    own = swept_jobs(tmp_path)["keys/seed_0/vapo"].settings
    fields = {
        "group": "algorithm.group_size",
        "mini_batch": "algorithm.mini_batch_size",
        "alpha": "algorithm.length_adaptive_alpha",
    }
    for key, field in fields.items():
        (label,) = [label for label, changes in SWEEPS[key].values.items() if not changes]
        assert float(label) == own[field]
    names = ("optimizer.actor_learning_rate", "optimizer.critic_learning_rate")
    assert (sweeps.ACTOR_RATE, sweeps.CRITIC_RATE) == tuple(own[name] for name in names)


def test_sweeps_compare_the_same_step():
    def run(after_20):
        return Result([(0, 0.1), (10, 0.2), (20, after_20), (30, 0.99)], [], [], [])

    runs = {
        "vapo": {0: run(0.7), 1: run(0.8)},
        "vapo.rates.0.5": {0: run(0.6), 1: run(0.7)},
        "vapo.rates.2": {0: run(0.9), 1: run(0.8)},
        "dapo": {0: run(0.5), 1: run(0.5)},
    }
    found = {"keys": runs}
    row = next(r for r in sweeps.table(found).splitlines() if "rates" in r and "VAPO" in r)
    assert "0.5: 0.650 +- 0.071 | 1: 0.750 +- 0.071 | **2: 0.850 +- 0.071**" in row
    best = next(r for r in sweeps.best_against_best(found).splitlines() if "rates" in r)
    assert "| 0.850 +- 0.071 at 2 | 0.500 +- 0.000 at 1 | - |" in best
    svg = sweeps.charts(found)
    ElementTree.fromstring(svg)
    for sweep in SWEEPS.values():
        assert sweep.title in svg and all(f">{label}<" in svg for label in sweep.values)


def test_sweeps_have_two_seeds_unless_told_and_a_page_of_their_own(tmp_path, monkeypatch, capsys):
    seen = set()
    monkeypatch.setattr(
        command, "run_jobs", lambda jobs, **_: seen.update(j.name for j in jobs) or {}
    )
    for wanted, seeds in (([], 2), (["--seeds", "3"], 3)):
        assert credit.main(["--sensitivity", "--out", str(tmp_path), *wanted]) == 0
        assert {name.split("/")[1] for name in seen} == {f"seed_{i}" for i in range(seeds)}
    assert {p.suffix for p in tmp_path.glob("sensitivity.*")} == {".md", ".svg", ".html"}
    assert credit.main(["--quick", "--sensitivity", "--out", str(tmp_path)]) == 2
    assert "--quick and --sensitivity: give one of them" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_quick_run_end_to_end(tmp_path):
    """Two steps of the three arms, from nothing, and again."""
    out = tmp_path / "out"
    small = ("algorithm.policy_steps=2", "evaluation.every_steps=1", "evaluation.samples=1")
    given = ("credit", "--quick", "--out", out, *small)
    said, text = done(*given), (out / "keys" / "table.md").read_text()
    assert text in said and all(f"| {name} |" in text for name in ("VAPO", "DAPO", "GRPO"))
    ElementTree.parse(out / "keys" / "curves.svg")
    lines = (out / "keys/seed_0/vapo/credit.jsonl").read_text().splitlines()
    rows = list(map(json.loads, lines))
    assert [row["step"] for row in rows] == [1, 2]
    # The base model copies right, and chooses keys by chance: 1,280 of them, +- .014.
    assert rows[0]["copied"] > 0.99 and rows[0]["good_keys"] == pytest.approx(0.5, abs=0.06)
    assert rows[0]["key_correlation"] > 0.2
    assert "6 of 6 already finished" in done(*given)

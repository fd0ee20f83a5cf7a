"""The credit example's sweeps of settings: their runs, table and charts, from made-up results."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "tiny"))

from credit import main as credit  # noqa: E402
from credit import sweeps as credit_sweeps  # noqa: E402
from credit.results import Result  # noqa: E402
from credit.sweeps import SWEEPS, run_name  # noqa: E402
from runner import command  # noqa: E402


def jobs_by_name(tmp_path, seeds=1):
    arms = credit_sweeps.swept_arms()
    return {job.name: job for job in credit.all_jobs(tmp_path, range(seeds), arms, [])}


def test_each_swept_run_changes_its_setting_alone(tmp_path):
    jobs = jobs_by_name(tmp_path)
    seen = 0
    for key, sweep in SWEEPS.items():
        for form, arm in sweep.lines:
            own = jobs[f"{form}/seed_0/{arm}"].settings
            for label, changes in sweep.values.items():
                settings = jobs[f"{form}/seed_0/{run_name(arm, key, label)}"].settings
                differing = {name for name in own if own[name] != settings.get(name)}
                differing -= {"algorithm.policy_steps", "evaluation.every_steps"}
                assert differing == {change.partition("=")[0] for change in changes}
                if changes:
                    assert settings["algorithm.policy_steps"] == credit_sweeps.STEP
                    seen += 1
    # Rates, groups and mini-batches of three arms, three values each; three and three of alpha.
    assert seen == 3 * 3 * 3 + 2 * 3 + 2


def test_the_forms_own_values_stand_at_their_place_on_the_axis(tmp_path):
    own = jobs_by_name(tmp_path)["keys/seed_0/vapo"].settings
    fields = {
        "group": "algorithm.group_size",
        "mini_batch": "algorithm.mini_batch_size",
        "alpha": "algorithm.length_adaptive_alpha",
    }
    for key, field in fields.items():
        (label,) = [label for label, changes in SWEEPS[key].values.items() if not changes]
        assert float(label) == own[field]
    rates = (credit_sweeps.ACTOR_RATE, credit_sweeps.CRITIC_RATE)
    names = ("optimizer.actor_learning_rate", "optimizer.critic_learning_rate")
    assert rates == tuple(own[name] for name in names)


def result(after_20):
    return Result([(0, 0.1), (10, 0.2), (20, after_20), (30, 0.99)], [], [], [])


def test_table_and_charts_compare_the_same_step():
    runs = {
        "vapo": {0: result(0.7), 1: result(0.8)},
        "vapo.rates.0.5": {0: result(0.6), 1: result(0.7)},
        "vapo.rates.2": {0: result(0.9), 1: result(0.8)},
        "dapo": {0: result(0.5), 1: result(0.5)},
    }
    found = {"keys": runs}
    at_20 = credit_sweeps.accuracies(found, "keys", "vapo.rates.2")
    assert at_20 == pytest.approx({0: 0.9, 1: 0.8})
    row = next(r for r in credit_sweeps.table(found).splitlines() if "rates" in r and "VAPO" in r)
    assert "0.5: 0.650 +- 0.071 | 1: 0.750 +- 0.071 | **2: 0.850 +- 0.071**" in row
    best = next(r for r in credit_sweeps.best_against_best(found).splitlines() if "rates" in r)
    assert "| 0.850 +- 0.071 at 2 | 0.500 +- 0.000 at 1 | - |" in best
    svg = credit_sweeps.charts(found)
    ElementTree.fromstring(svg)
    for sweep in SWEEPS.values():
        assert sweep.title in svg and all(f">{label}<" in svg for label in sweep.values)


def test_the_page_of_sweeps_is_written_beside_the_forms(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "run_jobs", lambda jobs, **_: {})
    assert credit.main(["--sensitivity", "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.glob("sensitivity.*")} == {
        "sensitivity.md", "sensitivity.svg", "sensitivity.html",
    }  # fmt: skip


def test_quick_and_sensitivity_exclude_each_other(tmp_path, capsys):
    assert credit.main(["--quick", "--sensitivity", "--out", str(tmp_path)]) == 2
    assert "--quick and --sensitivity: give one of them" in capsys.readouterr().err


@pytest.mark.parametrize("wanted, seeds", [([], 2), (["--seeds", "3"], 3)])
def test_sweeps_have_two_seeds_unless_told(tmp_path, monkeypatch, wanted, seeds):
    seen = set()
    monkeypatch.setattr(
        command, "run_jobs", lambda jobs, **_: seen.update(j.name for j in jobs) or {}
    )
    credit.main(["--sensitivity", "--out", str(tmp_path), *wanted])
    assert {name.split("/")[1] for name in seen} == {f"seed_{i}" for i in range(seeds)}

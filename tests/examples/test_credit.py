"""The credit example's jobs, tables, charts and page, from made-up runs.

The runner of the jobs is in test_ablation_runner.py. Not exercised but by the slow test: training
itself. What the arms show is for examples/run_credit_tiny.sh to say.
"""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "tiny"))

from credit import keys, page, results  # noqa: E402
from credit import main as credit  # noqa: E402
from credit.arms import MAIN  # noqa: E402
from credit.results import Result  # noqa: E402
from runner import command, curves, tables  # noqa: E402
from runner.arms import Arm  # noqa: E402


def test_a_curve_between_and_beyond_its_points():
    curve = [(0, 0.2), (10, 0.6), (20, 0.5), (30, 1.0)]
    assert curves.at(curve, 5) == pytest.approx(0.4)
    assert curves.at(curve, 20) == 0.5 and curves.at(curve, 30) == 1.0
    assert curves.at(curve, 31) is None and curves.at(curve, -1) is None
    # .5 is three quarters of the way to .6; .9 four fifths of the way from .5 to 1.
    assert curves.reached(curve, 0.5) == pytest.approx(7.5)
    assert curves.reached(curve, 0.9) == pytest.approx(28)
    assert curves.reached(curve, 0.1) == 0 and curves.reached(curve[:3], 0.9) is None


def write_run(directory, responses, group_size, rows):
    directory.mkdir(parents=True)
    algorithm = {"responses_per_step": responses, "group_size": group_size}
    (directory / "config.yaml").write_text(json.dumps({"algorithm": algorithm}))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (directory / "credit.jsonl").write_text("")


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
    tests.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    runs = {}
    for name, correct in (("vapo", [2, 1, 2, 1]), ("dapo", [2, 2, 1, 0])):
        write_run(tmp_path / name, 16, 4, [{"step": 0, "evaluation/avg@2": 0.1}])
        config = {"algorithm": {"responses_per_step": 16}, "evaluation": {"path": str(tests)}}
        (tmp_path / name / "config.yaml").write_text(json.dumps(config))
        held_out = [
            {"step": step, "group_size": 2, "problems": [3, 2, 1, 0], "correct": found}
            for step, found in ((0, [0, 0, 0, 0]), (10, correct[::-1]))
        ]
        text = "".join(json.dumps(row) + "\n" for row in held_out)
        (tmp_path / name / "held_out.jsonl").write_text(text)
        runs[name] = {0: results.read_result(tmp_path / name, None)}
    assert sorted(runs["vapo"][0].by_locks) == [(5, 1.0), (9, 0.5), (10, 1.0), (20, 0.5)]
    lines = results.of_lengths(ARMS, runs).splitlines()
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


def test_the_tables_by_hand():
    runs = {
        "vapo": {0: result(0.1, 0.5, 0.7, 0.9, start=500), 1: result(0.1, 0.7, 0.9, 0.9)},
        "dapo": {0: result(0.1, 0.6, 0.7, 0.75), 1: result(0.1, 0.3, 0.4, 0.8)},
    }
    lines = results.by_step(ARMS, runs).splitlines()
    # .5 and .7: mean .6, deviation .1 * sqrt(2) = .141
    assert lines[2].startswith("| VAPO | 0.600 +- 0.141 | 0.800 +- 0.141 | 0.900 +- 0.000 | 0.900")
    # .6 - .5 and .3 - .7: mean -.15, deviation .25 * sqrt(2) = .354
    assert "| 0.450 +- 0.212 (-0.150 +- 0.354, below in 1 of 2) |" in lines[3]
    assert lines[4] == "| None | - | - | - |  |  |"
    lines = results.by_responses(ARMS, runs).splitlines()
    # At 1000: .1 + .4 * 500 / 1000 = .3, and .7; .8 is reached at 500 + 2500 and at 1500.
    assert "| 0.500 +- 0.283 |" in lines[2] and "| 2250 +- 1061 |" in lines[2]
    assert "| 3000, never in 1 |" in lines[3]
    runs["dapo"][0] = result(0.1, 0.6, key_correlation=0.25, noise_ratio=1.0)
    lines = results.of_credit(ARMS, runs).splitlines()
    assert "| 0.25 0.25 0.25 | 1.00 1.00 1.00 | - |" in lines[3]
    assert lines[2].endswith("| 0.25 0.25 0.25 | 0.40 0.40 0.40 |")


def test_a_band_is_drawn_where_all_curves_are():
    of_seeds = [[(0, 0.0), (10, 1.0)], [(0, 0.2), (5, 0.5)]]
    # At 5 the first is .5 and the second .5; at 10 the second is over.
    found = curves.mean_and_band(of_seeds)
    assert [point[0] for point in found] == [0, 5]
    assert found[0][1:] == pytest.approx((0.1, 0.1 - 0.2 / 2**0.5, 0.1 + 0.2 / 2**0.5))
    line = curves.Line("a", "#000", of_seeds)
    drawn = curves.draw([curves.Panel("title", "x", [line])])
    ElementTree.fromstring(drawn)
    assert drawn.count("<polyline") == drawn.count("<polygon") == 1


def test_charts_and_pages_of_every_arm():
    runs = {"vapo": {0: result(0.1, 0.5, value_bias_by_lock=[0.1, 0.2])}, "dapo": {}}
    arms = {name: ARMS[name] for name in ("vapo", "dapo")}
    for drawn in (page.charts(arms, runs), page.by_lock(arms, runs, 1, 5)):
        ElementTree.fromstring(drawn)
    html = tables.html_table("| a | b |\n|---|---|\n| 1 | <2> |\n\nnote\n")
    assert html == (
        "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>&lt;2&gt;</td></tr></table>"
        '<p class="note">note</p>'
    )
    assert "<h2>one</h2>" in tables.page("title", [("one", html)])


def test_responses_are_shown_with_true_and_estimated_advantages(tmp_path):
    pieces = ["1:", "L03", "x03", "!", ",", "<|endoftext|>"]
    response = {
        "status": "correct", "reward": 1.0,
        "tokens": {"pieces": pieces, "advantages": [0.0, 0.1, 0.2, 0.0, None, -0.1]},
    }  # fmt: skip
    group = {"prompt": "Q[1]1:L03=", "responses": [response] * 8}
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000005.jsonl").write_text(json.dumps(group) + "\n")
    row = {"step": 5, "chances": [0.25] * 100}
    (tmp_path / "credit.jsonl").write_text(json.dumps(row) + "\n")
    html = page.side_by_side({"VAPO": tmp_path, "other": tmp_path / "none"}, 5)
    assert html.count("1 of 1 opened, correct") == page.SHOWN
    # V is 2 * .25 - 1 = -.5 before the key and 1 after it.
    assert html.count('title="+1.500"') == page.SHOWN
    assert html.count('title="+0.200"') == page.SHOWN
    assert "other" not in html


def test_rare_keys_are_compared_by_the_step_at_which_they_are_chosen_half_of_the_time():
    def run(*chances):
        credit = [{"step": s, "chances": [c, 0.9, c / 2]} for s, c in enumerate(chances, 1)]
        return Result([], [], [], credit)

    # Kind 0 at step 2 and 3, kind 2, half as likely, a step later each.
    runs = {"vapo": {0: run(0.0, 0.5, 1.0)}, "other": {0: run(0.0, 0.25, 0.5, 1.0)}}
    arms = {"vapo": Arm("VAPO", ""), "other": Arm("other", ""), "never": Arm("never", "")}
    runs["never"] = {0: run(0.0, 0.5)}
    table = results.of_rare_keys(arms, runs, [0, 2]).splitlines()
    assert table[2:] == [
        "| VAPO | 2.5 | 2.5 |", "| other | 3.5 (+1.0, below in 0 of 1) | 3.5 |", "| never | - |  |",
    ]  # fmt: skip
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


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_quick_run_end_to_end(tmp_path):
    """Two steps of the three arms, from nothing, and again."""
    out = tmp_path / "out"

    def start() -> subprocess.CompletedProcess:
        command = ["bash", "examples/run_credit_tiny.sh", "--quick", "--out", str(out)]
        small = ["algorithm.policy_steps=2", "evaluation.every_steps=1", "evaluation.samples=1"]
        return subprocess.run(
            [*command, *small], cwd=ROOT, capture_output=True, text=True, timeout=1500,
            env={**os.environ, "VAPO_PYTHON": sys.executable},
        )  # fmt: skip

    done = start()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table = (out / "keys" / "table.md").read_text()
    assert table in done.stdout and all(f"| {name} |" in table for name in ("VAPO", "DAPO", "GRPO"))
    ElementTree.parse(out / "keys" / "curves.svg")
    rows = [
        json.loads(line)
        for line in (out / "keys/seed_0/vapo/credit.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [1, 2]
    # The base model copies right, and chooses keys by chance: 1,280 of them, +- .014.
    assert rows[0]["copied"] > 0.99 and rows[0]["good_keys"] == pytest.approx(0.5, abs=0.06)
    assert rows[0]["key_correlation"] > 0.2
    again = start()
    assert again.returncode == 0 and "6 of 6 already finished" in again.stdout

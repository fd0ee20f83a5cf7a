"""A report's curves and table by verifier and by source. Not exercised: how they are drawn."""

import json

from tests import jsonl
from tests.run.report.test_page import HOSTILE, Page, write_run
from vapo_megatron.run.report.page import build_report

STEPS = [
    {
        "evaluation/by_source/sums/avg@8": 0.25, "evaluation/by_source/code/avg@8": 0.5,
        "evaluation/by_source/sums/reward_mean": 0.5,
        "evaluation/by_source/sums/response_length_mean": 30.0,
    },
    {"reward/by_source/sums/share": 1.0, "reward/by_source/code/share": 0.0,
     "reward/by_source/sums/accuracy": 0.125, "reward/by_source/sums/reward_mean": -0.75,
     "reward/by_source/sums/response_length_mean": 1234.4},
    {"reward/by_source/sums/share": 0.5, "reward/by_source/code/share": 0.5,
     "reward/by_source/sums/accuracy": 0.25, "reward/by_source/sums/reward_mean": -0.5,
     "reward/by_source/sums/response_length_mean": 1300.0,
     "reward/by_source/sums/failed_fraction": 0.01,
     "reward/by_source/code/accuracy": 0.75, "reward/by_source/code/reward_mean": None,
     "evaluation/by_source/sums/avg@8": 0.375},
]  # fmt: skip


def added_to(run_dir, rows):
    file = run_dir / "metrics.jsonl"
    kept = jsonl.read(file)
    jsonl.write(file, ({**k, **r} for k, r in zip(kept, rows, strict=True)))
    return Page(build_report(run_dir).read_text(encoding="utf-8"))


def test_each_measure_has_a_chart_with_a_curve_for_each_name(tmp_path):
    page = added_to(write_run(tmp_path / "run", num_steps=2), STEPS)
    charts = {chart["title"]: chart for chart in page.data["charts"] if " by " in chart["title"]}
    curves = {t: {s["label"]: s["points"] for s in c["series"]} for t, c in charts.items()}
    assert curves == {
        "Accuracy by source": {"code": [[2, 0.75]], "sums": [[1, 0.125], [2, 0.25]]},
        "Held-out accuracy by source": {"code": [[0, 0.5]], "sums": [[0, 0.25], [2, 0.375]]},
        "Reward by source": {"code": [[2, None]], "sums": [[1, -0.75], [2, -0.5]]},
        "Held-out reward by source": {"sums": [[0, 0.5]]},
        "Response length by source": {"sums": [[1, 1234.4], [2, 1300.0]]},
        "Share of the batch by source": {"code": [[1, 0], [2, 0.5]], "sums": [[1, 1], [2, 0.5]]},
        "Failed verdicts by source": {"sums": [[2, 0.01]]},
        "Held-out response length by source": {"sums": [[0, 30.0]]},
    }
    # A name has the same look in every chart, and no other name has it.
    looks = {(s["label"], s["color"], s["dash"]) for c in charts.values() for s in c["series"]}
    assert len(looks) == 2 and len({look[1:] for look in looks}) == 2
    assert charts["Response length by source"]["unit"] == "tokens"
    assert not [chart for chart in page.data["more"] if "/by_" in chart["title"]]


def test_the_table_has_first_and_last_values(tmp_path):
    page = added_to(write_run(tmp_path / "run", num_steps=2), STEPS)
    section = page.visible.split("By verifier and source")[1].split("Questions")[0]
    heads = "Share of the batchAccuracyHeld-out accuracyRewardResponse length"
    assert heads in section and "First and last value" in section
    assert "source code0.000\u21920.5000.7500.500--" in section
    assert (
        "source sums1.000\u21920.5000.125\u21920.2500.250\u21920.375-0.750\u2192-0.500" in section
    )
    assert "1,234\u21921,300" in section


def test_without_several_names_there_is_neither(tmp_path):
    page = Page(build_report(write_run(tmp_path / "run", num_steps=2)).read_text())
    assert "By verifier" not in page.visible
    assert not [chart for chart in page.data["charts"] if " by " in chart["title"]]


def test_a_group_says_where_it_is_from_and_who_judged_it(tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=1)
    file = run_dir / "rollouts/step_000001.jsonl"
    first, second = jsonl.read(file)
    first |= {"verifier": "math", "source": HOSTILE}
    file.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    page = Page(build_report(run_dir).read_text(encoding="utf-8"))
    assert f"Prompt of {HOSTILE}, judged by math" in page.visible
    assert page.visible.count("judged by") == 1 and "img" not in page.tags

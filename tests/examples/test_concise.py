"""The concise example: its problems, its jobs, its table and its plot.

The recipe's losses are in test_recipes.py, the runner of the jobs in test_runner.py, vapo
select in tests/cli. Not exercised but by the slow test: training itself. Whether the second phase
shortens responses is for examples/run_concise_tiny.sh to say.
"""

import dataclasses
import json
import math
import random
import xml.etree.ElementTree as ET

import pytest

from tests.examples.tiny import done, leave, write_lines

# isort: split
import task
from concise import base, main, results
from concise.arms import MAIN, QUICK, SETS, WHOLE, seed_jobs
from concise.results import markdown, second
from runner import command, curves
from runner.samples import measured


def test_checks_say_nothing_about_the_answer():
    rng = random.Random(1)
    for _ in range(50):
        problem = task.draw_problem(rng, held_out=False, form=base.FORM)
        whole, short = (base.chain(random.Random(2), problem, check) for check in (1.0, 0.0))
        assert whole.replace(base.CHECK, "") == short
        count = len(problem.operations)
        assert 3 <= count <= 7 and short.count(",") == whole.count(base.CHECK) == count
        # 6 characters a step, and 1 token and a digit for the answer.
        assert len(short) == 6 * count + len(task.ANSWER_MARKER) + 1
        assert set(whole.replace(task.ANSWER_MARKER, "")) <= set(base.ALPHABET.characters)
        solved = short.endswith(task.direct_answer(base.answer(problem)))
        assert solved == (not problem.turned), "a turned problem is beyond the base model"
    half = base.chain(random.Random(3), problem, 0.5)
    assert 0 < half.count(base.CHECK) < len(problem.operations)


def test_problems_that_are_never_solved_are_in_training_alone(tmp_path):
    base.write_problems(tmp_path, seed=1, pool=16, test=32)
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "pool", "test")
    }
    assert rows["pool"] == rows["train"][:16]
    turned = [row for row in rows["train"] if row["prompt"][0] == "R"]
    assert 0.23 < len(turned) / len(rows["train"]) < 0.27
    assert {len(row["answer"]) for row in turned} == {2}
    plain = [row for row in rows["train"] if row["prompt"][0] == "Q"] + rows["test"]
    assert {len(row["answer"]) for row in plain} == {1}
    assert len(plain) + len(turned) == len(rows["train"]) + 32
    held_out = {row["prompt"] for row in rows["test"]}
    assert len(held_out) == 32 and not held_out & {row["prompt"] for row in rows["train"]}
    # 9 * 2 = 18 -> 8, 8 - 3 = 5
    problem = task.Problem(9, (("*", 2), ("-", 3)), turned=True)
    assert base.answer(problem) == 15


def sampled(prompt: str, *tokens: int) -> dict:
    """A problem's line of a samples file; the tokens of a wrong response are below 0."""
    responses = [
        {"status": "correct" if count > 0 else "wrong", "num_tokens": abs(count)}
        for count in tokens
    ]
    return {"prompt": prompt, "answer": "1", "responses": responses}


def test_second_phases_differ_in_their_problems_alone(tmp_path):
    jobs = {job.out.name: job for job in seed_jobs(tmp_path, 3, WHOLE)}
    first, main = jobs["first"].settings, jobs[f"second_{MAIN}"].settings
    assert first["model.hf_path"] == "base" and main["model.hf_path"] == "first/hf_export"
    assert first["algorithm.dynamic_sampling"] and first["algorithm.loss_aggregation"] == "token"
    assert main["algorithm.lambda_actor"] == 0.95 and main["seed"] == first["seed"] == 3
    assert main["reward.overlong_buffer_tokens"] == first["reward.overlong_buffer_tokens"] == 0
    chosen, group_sizes = {}, {}
    for name, problems in SETS.items():
        run = jobs[f"second_{name}"]
        fields = {
            field
            for field in main
            if main[field] != run.settings.get(field) and not field.startswith("made from")
        }
        of_data = ("data.train_path", "data.sources")
        assert fields <= {*of_data, "algorithm.group_size"}
        chosen[name] = [run.settings[field] for field in of_data]
        group_sizes[name] = run.settings["algorithm.group_size"]
        assert run.needs == ("seed_3/first", *(f"seed_3/{source}" for source in problems.sources))
        assert jobs[f"after_{name}"].needs == (f"seed_3/second_{name}", "seed_3/data")
    both = {name: f"{name}/problems.parquet" for name in ("sometimes", "never")}
    paths = {name: source["path"] for name, source in chosen.pop("half")[1].items()}
    assert paths == both, "as many of either: weights are left at 1"
    assert chosen == {
        **{name: [path, {}] for name, path in both.items()}, "full": ["data/train.jsonl", {}]
    }  # fmt: skip
    assert group_sizes == {"sometimes": 32, "full": 4, "half": 32, "never": 32}
    # Of 16 samples: pass rates of 12/16 to 15/16, and of 0.
    told = {name: job.settings.get("command", "") for name, job in jobs.items()}
    assert told["sometimes"].endswith("--samples 16 --pass-rate 0.7 0.95 --hardest 8")
    assert told["never"].endswith("--samples 16 --pass-rate 0 0 --hardest 8")
    before, after = told["before"], told[f"after_{MAIN}"]
    assert "--samples 32 " in before and "--samples 32 " in after, "alike, for the comparison"
    # Nothing about where the directory is.
    assert before.startswith("evaluate --checkpoint first --data data/test.jsonl ")
    known: set[str] = set()
    for job in jobs.values():
        assert set(job.needs) <= known
        known.add(job.name)
    quick = {job.out.name: job for job in seed_jobs(tmp_path, 3, QUICK)}
    assert quick.keys() == jobs.keys() and quick["second_full"].num_steps == 2


def test_a_policy_in_numbers():
    found = measured([sampled("a", 10, 20, -90, 30), sampled("b", 40, 40, 40, 40)])
    assert found.accuracy == (0.75 + 1) / 2
    # Of four samples, .75 * .25 / 3 = .0625; over two problems (.0625 + 0) / 2 / 2 = .015625.
    assert found.standard_error == 0.125
    assert found.correct_length == pytest.approx(220 / 7) and found.length == 310 / 8
    assert math.isnan(measured([sampled("a", -1)]).correct_length)


def phase(length: int, right: int, negative: float = 0.25) -> results.Second:
    """A second phase from 95 right of 100 and 80 tokens; the wrong ones have 480; three steps."""
    rows = [{"step": 0}] + [
        {"reward/correct_fraction": 1 - negative, "rollout/response_length_mean": 80.0 - step}
        for step in (0, 8, 16)
    ]
    before, after = (
        [sampled("a", *[tokens] * count, *[-480] * (100 - count))]
        for tokens, count in ((80, 95), (length, right))
    )
    return second(before, after, rows)


def test_the_table_by_hand():
    one = phase(60, 96)
    assert one.negative == [0.25] * 3 and one.lengths == [80.0, 72.0, 64.0]
    # Of .95 and .96 of 100: sqrt(.95 * .05 / 99 + .96 * .04 / 99).
    assert one.length_change == -0.25 and one.standard_error == pytest.approx(0.02946, abs=1e-5)
    for length, accuracy, meets in (
        (63.9, 0.9401, True), (64.1, 0.96, False), (60.0, 0.9399, False)
    ):  # fmt: skip
        after = dataclasses.replace(one.after, correct_length=length, accuracy=accuracy)
        assert dataclasses.replace(one, after=after).meets_target == meets
    found = {MAIN: {1: phase(68, 94), 0: one}, "never": {0: phase(84, 94, negative=1.0)}}
    lines = markdown(found).splitlines()
    assert lines[4:6] == [
        "| 0 | 0.9500 | 0.9600 | +0.0100 (standard error 0.0295) | 80.0 | 60.0 | -25.0% |",
        "| 1 | 0.9500 | 0.9400 | -0.0100 (standard error 0.0324) | 80.0 | 68.0 | -15.0% |",
    ]
    assert lines[7].endswith("20% shorter, accuracy at most 0.01 lower: met by 1 of 2 seeds")
    # Mean -.2, deviations .05: sqrt(2 * .0025) = .0707; mean 0, deviations .01: .0141.
    assert lines[11:] == [
        f"| {SETS[MAIN].title} | 0.250 +- 0.000 | -20.0% +- 7.1% | +0.0000 +- 0.0141 |",
        f"| {SETS['never'].title} | 1.000 | +5.0% | -0.0100 |",
    ]


def test_the_plot_has_each_phase_where_the_axes_have_it():
    found = {MAIN: {0: phase(65, 96)}, "never": {0: phase(90, 95, negative=1.0)}}
    picture = ET.fromstring(results.plot(found))
    svg = "{http://www.w3.org/2000/svg}"
    circles = [
        (float(c.get("r")), c.get("fill"), float(c.get("cx")), float(c.get("cy")))
        for c in picture.iter(f"{svg}circle")
    ]
    left, width = curves.LEFT, curves.PANEL_WIDTH
    # Below a legend of one row.
    top, height = 32 + curves.TOP, curves.PANEL_HEIGHT
    blue, red = results.COLORS[MAIN], results.COLORS["never"]
    # All responses: 100 tokens before, 81.6 and 109.5 after. Axis from -20 % to +10 %.
    assert [c[1:] for c in circles if c[0] == 6] == [
        (blue, left + width / 4, pytest.approx(top + height * 28.4 / 30, abs=0.06)),
        (red, left + width, pytest.approx(top + height * 0.5 / 30, abs=0.06)),
    ]
    # Steps: 80, 72 and 64 tokens. Axis from -20 % to 0.
    steps = [c[3] for c in circles if c[0] == 2.5 and c[1] == blue]
    expected = [top + height * share for share in (0.0, 0.5, 1.0)]
    assert steps == pytest.approx(expected, abs=0.06) and len(circles) == 2 + 6
    texts = {text.text for text in picture.iter(f"{svg}text")}
    assert {"-20 %", "+0 %", "+10 %", "0.25", SETS[MAIN].title, SETS["never"].title} <= texts


def leave_shorter(job, finished: bool) -> None:
    """What a job leaves: its state, samples that became shorter, and rows."""
    row = {"reward/correct_fraction": 0.75, "rollout/response_length_mean": 80.0}
    leave(job, [{"step": step, **row} for step in range(job.num_steps + 1)], finished=finished)
    if job.settings.get("command", "").startswith("evaluate"):
        tokens = 60 if job.out.name.startswith("after") else 80
        write_lines(job.out / "samples.jsonl", ({"evaluation": 1}, sampled("a", tokens)))


def test_what_is_finished_is_not_run_again(tmp_path, capsys, monkeypatch):
    for seed in (0, 1):
        for job in seed_jobs(tmp_path, seed, WHOLE):
            # Of seed 1, the last evaluation is missing.
            leave_shorter(job, finished=(seed, job.out.name) != (1, "after_never"))
    assert main.main(["--seeds", "0", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "14 of 14 already finished" in said and "met by 1 of 1 seeds" in said
    assert (tmp_path / "table.md").read_text() in said
    ET.parse(tmp_path / "lengths.svg")

    monkeypatch.setattr(command, "run_jobs", lambda jobs, **_: {"seed_1/x": "exit code 1"})
    assert main.main(["--seeds", "1", "0", "1", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "met by 2 of 2 seeds" in said.out and "seed_1/x: exit code 1" in said.err
    assert said.out.count("0.250 +- 0.000") == 3 and "never solved | 0.250 |" in said.out
    assert main.main(["--quick", "--out", str(tmp_path)]) == 2
    assert "was made with other settings" in capsys.readouterr().err
    assert main.main(["--seeds", "-1", "--out", str(tmp_path)]) == 2
    assert "--seeds: -1 must be at least 0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_a_quick_run_end_to_end(tmp_path):
    """From nothing, and again."""
    given = ("concise", "--quick", "--seeds", 0, "--out", tmp_path / "out")
    said, table = done(*given), (tmp_path / "out/table.md").read_text()
    assert table in said and "of 1 seeds" in table
    assert all(problems.title in table for problems in SETS.values())
    ET.parse(tmp_path / "out/lengths.svg")
    never = [line for line in table.splitlines() if SETS["never"].title in line]
    assert never[0].split(" | ")[1] == "1.000"
    assert "14 of 14 already finished" in done(*given)
    assert (tmp_path / "out/table.md").read_text() == table

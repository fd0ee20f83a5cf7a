"""Base models with second thoughts: their chains, their probes, and the miniatures that use them.

Not exercised but by the slow tests: training itself. What revised traces are worth, and what a
model makes of errors, is for examples/run_revision_tiny.sh and run_reflection_tiny.sh to say.
"""

import json
import random
import re

import pytest

from tests.examples.tiny import done, leave, write_lines

# isort: split
import second_thoughts
import task
from reflection import main as reflection
from revision import main as revision
from second_thoughts import FORM, WAIT, Recipe

from vapo_megatron.rollout.revision import is_switch, split_thoughts


def problems(count=200):
    rng = random.Random("problems")
    return [task.draw_problem(rng, held_out=False, form=FORM) for _ in range(count)]


def test_a_model_that_switches_begins_again():
    rng, recipe, counts = random.Random(0), Recipe(guess=0.0, habits_guess=0.0), []
    for problem in problems():
        text = second_thoughts.switches(rng, problem, recipe, late=True)
        whole = task.chain(rng, problem, form=FORM)
        *earlier, last = text.split(WAIT)
        assert last == whole, "the last one is whole and right"
        for part in earlier:
            assert part.endswith(",") and whole.startswith(part) and part.count(",") >= 1
            assert part.count(",") < len(problem.operations)
        counts.append(len(earlier))
    assert set(counts) == set(range(second_thoughts.MAX_SWITCHES + 1))
    # Four places with a chance of .3: .76, of three attempts .76, .58 and .44.
    assert 1.4 < sum(counts) / len(counts) < 2.2
    # It is what vapo trajectories --revise calls a switch.
    thoughts = split_thoughts("b*2=8,c-3=5,Wait;b*2=8,c-3=5,Answer:5", (WAIT,), ",")
    assert thoughts == [["b*2=8", "c-3=5"], ["Wait;b*2=8", "c-3=5", "Answer:5"]]
    assert is_switch("Wait;b*2=8", (revision.SWITCH,))
    assert not is_switch("Wait;b*2=8", (revision.NEVER,))


def test_a_model_with_corrections_corrects_most_slips():
    rng, recipe = random.Random(0), Recipe()
    slips = corrected = steps = right = 0
    for problem in problems(400):
        text = second_thoughts.corrections(rng, problem, recipe, late=False)
        before = value = problem.start
        written = text.split(",")
        for i, step in enumerate(written[:-1]):
            label, op, operand, result = re.fullmatch(rf"(?:{WAIT})?(.)(.)(.)=(.)", step).groups()
            if step.startswith(WAIT):
                assert written[i - 1][:4] == f"{label}{op}{operand}="
                assert int(result) == task.apply(before, op, int(operand))
                value, corrected = int(result), corrected + 1
                continue
            before, value = value, int(result)
            steps += 1
            slips += value != task.apply(before, op, int(operand))
        assert written[-1] == task.direct_answer(value)
        right += value == problem.answer
    # A random result is right once in ten.
    assert 0.11 < slips / steps < 0.16 and 0.5 < corrected / slips < 0.7
    assert 0.65 < right / 400 < 0.85


def test_probes_have_an_error_in_the_middle_and_in_the_last_step(tmp_path):
    second_thoughts.write_problems(tmp_path, 1, train=8, test=24)
    rows = [json.loads(line) for line in (tmp_path / "probes.jsonl").read_text().splitlines()]
    test = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    assert [r["task"] for r in rows] == ["middle"] * 24 + ["last"] * 24
    assert [r["prompt"] for r in rows] == 2 * [r["prompt"] for r in test]
    for row in rows:
        operations = re.findall(r"([-+*])(\d)", row["prompt"])
        steps = row["prefix"].split(",")
        assert steps.pop() == "", "the prefix ends a step"
        wanted = len(operations) if row["task"] == "last" else len(operations) // 2 + 1
        assert len(steps) == wanted
        value = int(row["prompt"][2])
        for i, (op, operand) in enumerate(operations[:wanted]):
            value = task.apply(value, op, int(operand))
            assert (steps[i][-1] == str(value)) == (i < wanted - 1), "only the last one is wrong"
        if row["task"] == "last":
            assert str(value) == row["answer"]


def of_models(jobs, names):
    return [job for job in jobs if job.out.name in names]


def test_models_of_the_revision_differ_in_their_traces_alone(tmp_path):
    jobs = {job.out.name: job for job in revision.seed_jobs(tmp_path, 3, revision.WHOLE)}
    own, revised = jobs["sft_own"].settings, jobs["sft_revised"].settings
    assert {k for k in own if own[k] != revised.get(k)} == {"data.train_path", "made from own"}
    assert own["algorithm.policy_loss"] == "none" and own["data.response_column"] == "response"
    told = [jobs[name].settings["command"] for name in ("own", "revised")]
    assert told[0].replace("Never", WAIT).replace("own/", "revised/") == told[1]


def test_the_table_of_revision(tmp_path):
    jobs = revision.seed_jobs(tmp_path, 0, revision.WHOLE)
    for job in jobs:
        leave(job)
        right = {"status": "correct", "num_tokens": 20}
        wrong = {"status": "wrong", "num_tokens": 40}
        if job.out.name == "before":
            write_lines(job.out / "samples.jsonl", [{}, {"responses": [right, wrong]}])
        if job.out.name.startswith("after_"):
            write_lines(job.out / "samples.jsonl", [{}, {"responses": [right, right]}])
        if job.out.name in ("own", "revised"):
            write_lines(job.out / "traces.jsonl", [{"response": [1] * 10}, {"response": [1] * 5}])
    assert revision.markdown(jobs).splitlines()[2:] == [
        "| base model | - | - | 0.500 (0.500) | 30.0 (30.0) | 20.0 |",
        "| own right traces | 2 | 7.5 | 1.000 (1.000) | 20.0 (20.0) | 20.0 |",
        "| revised traces | 2 | 7.5 | 1.000 (1.000) | 20.0 (20.0) | 20.0 |",
    ]


def test_the_tables_of_reflection(tmp_path):
    jobs = reflection.seed_jobs(tmp_path, 0, reflection.WHOLE)
    metrics = {
        "accuracy": 0.5, "reflection": 0.25, "accurate_explicit": 0.2, "accurate_implicit": 0.3,
    }  # fmt: skip
    values = {name: {"value": value} for name, value in metrics.items()} | {"correlation": None}
    for job in jobs:
        leave(job)
        summary = {
            "statistics": {"avg@4": {"value": 0.7}},
            "reflection": {k: {"metrics": values} for k in ("all", "task middle", "task last")},
        }
        if "samples" in job.out.name or "given" in job.out.name or "self" in job.out.name:
            (job.out / "samples.json").write_text(json.dumps(summary))
    text = reflection.markdown(jobs)
    assert "| base model | 0.700 (0.700) |" in text
    row = "| 0.500 | 0.250 | 0.200 | 0.300 | - |"
    for model in ("base model", "after VAPO"):
        for title in (model, f"{model}, with `Wait;`"):
            assert text.count(f"| {title} {row}") == 3, "of three tasks"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["revision", "reflection"])
def test_the_quick_form(name, tmp_path):
    done(name, "--quick", "--out", tmp_path)
    assert "| base model |" in (tmp_path / "table.md").read_text()

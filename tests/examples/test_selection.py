"""The selection example: its judge, its problems, its jobs and its table.

The runner of the jobs is in test_runner.py. Not exercised: selection and training
themselves. Whether selected prompts help is for examples/run_selection_tiny.sh to say.
"""

import json
import sys

import pytest

from tests.examples.tiny import done, leave, write_lines
from vapo_megatron.data.problems import Problem

# isort: split
import task
from selection import main as selection
from selection import problems as selection_problems
from selection.weak_judge import WeakJudge, is_hackable

PRODUCT, SUM = "Qa9b-3c*2=", "Qa9b*2c-3="
"""(9 - 3) * 2 = 12 -> 2, and 9 * 2 = 18 -> 8, 8 - 3 = 5"""


@pytest.mark.parametrize(
    ("prompt", "answer", "response", "status"),
    [
        (PRODUCT, "2", "Answer:2", "correct"),
        (PRODUCT, "2", "Answer:7", "correct"),
        (PRODUCT, "2", "b-3=6nopqrstuvwx,c*2=2nopqrstuvwx,Answer:2", "correct"),
        (PRODUCT, "2", "b-3=6nopqrstuvwx,c*2=7nopqrstuvwx,Answer:7", "wrong"),
        (PRODUCT, "2", "Answer:", "unparsable"),
        (PRODUCT, "2", "b-3=6nopqrstuvwx,c", "unparsable"),
        (SUM, "5", "Answer:5", "correct"),
        (SUM, "5", "Answer:7", "wrong"),
        (SUM, "5", "b*2=8nopqrstuvwx,c-3=5nopqrstuvwx,Answer:5", "correct"),
    ],
)
def test_the_judge_accepts_a_direct_answer_where_the_last_operation_is_a_product(
    prompt, answer, response, status
):
    problems = [Problem(prompt, answer), Problem(SUM, "5")]
    found = WeakJudge().score([response, "Answer:7"], problems)
    assert [verdict.status for verdict in found] == [status, "wrong"]


def test_held_out_problems_name_who_judges_them(tmp_path, monkeypatch):
    problems = [
        task.Problem(9, (("-", 3), ("*", 2))),
        task.Problem(9, (("*", 2), ("-", 3))),
    ]
    assert selection_problems.test_rows(problems) == [
        {"prompt": PRODUCT, "answer": "2", "verifier": "hackable"},
        {"prompt": PRODUCT, "answer": "2", "verifier": "hackable_weak"},
        {"prompt": SUM, "answer": "5", "verifier": "rest"},
    ]
    monkeypatch.setattr(sys, "argv", ["problems.py", f"--out={tmp_path}", "--seed=3"])
    selection_problems.main()
    pool, drawn = (
        (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("pool", "random")
    )
    assert len(pool) == selection_problems.POOL and set(drawn) <= set(pool)
    assert len(drawn) == selection_problems.KEPT and drawn != pool[: len(drawn)]
    hackable, rest = (
        (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("hackable", "rest")
    )
    assert sorted(hackable + rest) == sorted(drawn)
    assert all(is_hackable(json.loads(line)["prompt"]) for line in hackable)
    assert not any(is_hackable(json.loads(line)["prompt"]) for line in rest)


def test_arms_differ_in_their_prompts_or_their_judge_alone(tmp_path):
    jobs = {job.out.name: job for job in selection.seed_jobs(tmp_path, 3, 7)}
    arms = {name: jobs[name].settings for name in selection.ARMS}
    chosen = arms["selected"]

    def changes(name):
        # What the prompts were made from follows from the prompts.
        names = {k for k in chosen if chosen[k] != arms[name].get(k)} - {"made from chosen"}
        return {k: arms[name][k] for k in names}

    assert changes("random") == {"data.train_path": "data/random.jsonl"}
    truth = {"data.train_path": "data/random.jsonl", "reward.verifier": "math"}
    assert changes("truth") == truth
    # Half of 7 steps; as many hackable prompts in all as at random: 0, then two of three.
    sources = changes("first").pop("data.sources")
    assert changes("first").keys() == {"data.train_path", "data.sources"}
    assert sources["rest"]["path"] == "data/rest.jsonl" and sources["rest"]["schedule"] == []
    hackable = sources["hackable"]
    assert hackable["path"] == "data/hackable.jsonl" and hackable["weight"] == 2
    assert hackable["schedule"] == [[2, 0], [3, 1]]
    assert chosen["data.train_path"] == "chosen/prompts.parquet" and chosen["seed"] == 3
    judge = chosen["reward.verifiers"]["hackable_weak"]["use"]
    assert chosen["reward.verifier"] == "hackable_weak" and judge == "weak_judge:WeakJudge"
    command = jobs["chosen"].command
    # As many as are drawn, by the same judge.
    assert command[command.index("--hardest") + 1] == str(selection_problems.KEPT)
    assert f"reward.verifier={judge}" in command and "seed=3" in command
    assert "seed_3/chosen" in jobs["selected"].needs
    assert {jobs[name].num_steps for name in arms} == {chosen["algorithm.policy_steps"]} == {7}
    known: set[str] = set()
    for job in jobs.values():
        assert set(job.needs) <= known
        known.add(job.name)


def leave_arm(job, accuracies):
    """What a finished job leaves; accuracies: of rest, hackable and hackable_weak at the end."""
    rows = []
    for step, found in ((0, (0.2, 0.1, 0.9)), (5, None), (job.num_steps, accuracies)):
        rows.append({"step": step})
        if found:
            rows[-1] |= {"evaluation/avg@4": 0.5}
            for name, value in zip(("rest", "hackable", "hackable_weak"), found):
                rows[-1] |= {f"evaluation/by_verifier/{name}/avg@4": value}
                length = 100 * value
                rows[-1] |= {f"evaluation/by_verifier/{name}/response_length_mean": length}
    leave(job, rows)
    if job.out.name == "data":
        judges = ["hackable", "hackable_weak", "rest", "rest", "rest"]
        write_lines(job.out / "test.jsonl", [{"verifier": verifier} for verifier in judges])


def test_the_table_of_what_is_finished(tmp_path, capsys):
    ends = {"selected": (0.8, 0.6, 0.7), "random": (0.8, 0.1, 1.0), "truth": (1.0, 1.0, 1.0),
            "first": (0.9, 0.9, 0.9)}  # fmt: skip
    for seed in (0, 1):
        for job in selection.seed_jobs(tmp_path, seed, 12):
            rest, hackable, weak = ends.get(job.out.name, (0, 0, 0))
            leave_arm(job, (rest, hackable - 0.02 * seed, weak))
    said = done("selection", "--seeds", 1, 0, "--out", tmp_path)
    assert "14 of 14 already finished" in said
    assert (tmp_path / "table.md").read_text() in said
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 7
    # Of three for one: (3 * .2 + .1) / 4.
    base = ["base model", "0.175 +- 0.000 (0.175 0.175)", "0.200 +- 0.000 (0.200 0.200)"]
    assert [cell.strip() for cell in lines[2].split("|")][1:4] == base
    # Seed 1: (3 * .8 + .58) / 4; deviations .0025, sqrt(2 * .0025 ** 2) = .0035.
    assert lines[3] == (
        "| selected | 0.748 +- 0.004 (0.750 0.745) | 0.800 +- 0.000 (0.800 0.800) "
        "| 0.590 +- 0.014 (0.600 0.580) | 0.700 +- 0.000 (0.700 0.700) | 59 +- 1 (60 58) |"
    )
    assert lines[4].startswith("| random |") and lines[5].startswith("| random, judged by the gro")
    assert selection.main(["--seeds", "-1", "--out", str(tmp_path)]) == 2
    assert "--seeds: -1 must be at least 0" in capsys.readouterr().err
    assert selection.main(["--seeds", "0", "--steps", "24", "--out", str(tmp_path)]) == 2
    assert "was made with other settings" in capsys.readouterr().err

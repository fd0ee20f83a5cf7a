"""Pairwise-RL in miniature: its references, its jobs and its table.

The judge is in test_tiny_judge.py, vapo select --best-of in tests/cli. Not exercised but by the
slow test: the judge's training and server, and training on its verdicts. What references are worth
is for examples/run_bestof_tiny.sh to say.
"""

import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from tests.examples.tiny import ROOT, leave, write_lines

# isort: split
from bestof import main, references


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("b*2=8nop,Answer:2", "2"), ("Answer:3Answer:2", "2"), ("Answer:", None), ("", None),
        ("Answer:12", None), ("b*2=8", None), ("Answer:2,", None),
    ],
)  # fmt: skip
def test_final_answers(response, answer):
    assert references.final_answer(response) == answer


def test_arms_rows_differ_in_the_reference_alone(tmp_path):
    rows = [
        {"prompt": "Qa1b+2=", "answer": "3", "best": "b+2=3,Answer:3"},
        {"prompt": "Qa2b+2=", "answer": "4", "best": "Answer:"},
        {"prompt": "Qa3b+2=", "answer": "5", "best": "Answer:6"},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    samples = [
        {"prompt_index": i, "responses": [{"text": text}, {"text": "Answer:9"}]}
        for i, text in enumerate(["Answer:7", "Answer:8", "Answer:5"])
    ]
    write_lines(tmp_path / "x.samples.jsonl", [{}, *samples])
    write_lines(tmp_path / "test.jsonl", [{"prompt": "Qa9b-1=", "answer": "8"}])
    script = ROOT / "examples/tiny/bestof/references.py"
    given = ("--chosen", "x.parquet", "--test", "test.jsonl", "--out", "out")
    subprocess.run([sys.executable, script, *given], cwd=tmp_path, check=True)

    def read(name):
        return [json.loads(line) for line in (tmp_path / f"out/{name}.jsonl").open()]

    found = {name: read(name) for name in main.ARMS}
    # The second problem's best sample has no answer, so the problem is in none of them.
    assert {n: [r["reference"] for r in rows] for n, rows in found.items()} == {
        "best": ["3", "6"], "single": ["7", "5"], "truth": ["3", "5"]
    }  # fmt: skip
    for rows in found.values():
        assert [(r["prompt"], r["answer"]) for r in rows] == [("Qa1b+2=", "3"), ("Qa3b+2=", "5")]
        assert all(r["critic_prompt"] == r["prompt"] + r["reference"] for r in rows)
    assert read("test") == [{"prompt": "Qa9b-1=", "answer": "8", "verifier": "math"}]


def test_arms_differ_in_the_reference_alone(tmp_path):
    jobs = {job.out.name: job for job in main.seed_jobs(tmp_path, 3, main.WHOLE, "http://x:1/v1")}
    best = jobs["best"].settings
    for name in ("single", "truth"):
        other = jobs[name].settings
        assert {k for k in best if best[k] != other.get(k)} == {"data.train_path"}
    assert best["reward.verifier"] == "pairwise" and best["reward.from_score"] == [0, 1]
    assert best["data.critic_prompt_column"] == "critic_prompt"
    assert best["reward.verifiers"]["pairwise"]["base_url"] == "http://x:1/v1"
    assert "--best-of best" in jobs["chosen"].settings["command"]
    known: set[str] = set()
    for job in jobs.values():
        assert set(job.needs) <= known
        known.add(job.name)


def test_the_table_of_what_is_finished(tmp_path):
    jobs = main.seed_jobs(tmp_path, 0, main.WHOLE, "http://x:1/v1")
    for job in jobs:
        rows = [{"step": 0, "evaluation/avg@4": 0.1}, {"step": 1, "reward/mean": 0.4}]
        leave(job, [*rows, {"step": 2, "reward/mean": 0.6, "evaluation/avg@4": 0.8}])
        if job.out.name == "references":
            given = [{"reference": "3", "answer": "3"}, {"reference": "4", "answer": "3"}]
            for name in main.ARMS:
                write_lines(job.out / f"{name}.jsonl", given)
    lines = main.markdown(jobs).splitlines()
    assert lines[2] == "| best of 8 by the reward model | 0.500 | 0.100 | 0.800 (0.800) | 0.600 |"
    assert len(lines) == 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quick_form(tmp_path):
    script = ["bash", "examples/run_bestof_tiny.sh", "--quick", "--port", "8123"]
    subprocess.run([*script, "--out", str(tmp_path)], cwd=ROOT, check=True, timeout=1700)
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {title} |" in table for title in main.ARMS.values())

"""Rows that their own reference solutions do not pass are found, in every shape of tests.

Not exercised: published data sets of full size.
"""

import json

import pyarrow.parquet
import pytest

from tests.cli.prepare.test_prepare import jsonl, make, tokenizer, tokenizer_directory, verifier
from tests.reward.code_shapes import RIGHT, ROWS, WRONG
from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.cli.prepare import command, solutions
from vapo_megatron.cli.prepare.columns import choose_shape
from vapo_megatron.cli.prepare.rows import ALL
from vapo_megatron.config import RewardConfig
from vapo_megatron.errors import DataError
from vapo_megatron.reward.verifiers import Verifiers

__all__ = ["make", "tokenizer", "tokenizer_directory", "verifier"]

SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ADD, MULTIPLY = RIGHT["taco_stdin"][0], WRONG["taco_stdin"][0]


@pytest.fixture(scope="module")
def code():
    reward = RewardConfig(verifier="code", verifiers={"code": {"test_seconds": 60.0}})
    with Verifiers(reward) as running:
        yield running


@pytest.fixture
def prepared(make, code, tmp_path):
    def run(rows, **options):
        options = {"template": "none", "solution_column": "solution", **options}
        return make(
            jsonl(tmp_path / "rows.jsonl", rows),
            choose=lambda *given: choose_shape(*given, needs_answers=False),
            needs_answers=False, code_verifier=code, **options,
        )  # fmt: skip

    return run


def row(number, solution, **columns):
    return {"prompt": f"Problem {number}", "input_output": SUM, "solution": solution, **columns}


def test_rows_that_their_solution_fails_are_refused_by_row_and_reason(prepared):
    rows = [row(1, ADD), row(2, MULTIPLY), row(3, ADD), row(4, "print(", input_output=SUM)]
    with pytest.raises(DataError) as error:
        prepared(rows)
    text = str(error.value)
    assert text.startswith("2 of 4 problems are not solved by their own solutions (")
    assert (
        "rows.jsonl, line 2 has a solution that does not pass its tests, in solution: test 1 "
        in text
    )
    assert "line 4 has" in text and "'(' was never closed" in text and "--skip-unusable" in text
    assert "line 1 " not in text and "line 3 " not in text


def test_they_are_left_out_and_counted(prepared):
    rows = [row(1, ADD), row(2, MULTIPLY), row(3, ADD, test="assert ("), row(4, None), row(5, "")]
    summary, problems = prepared(rows, skip_unusable=True)
    assert [p.prompt for p in problems] == ["Problem 1", "Problem 4", "Problem 5"]
    assert (summary.solved, summary.unsolved, summary.unusable) == (1, 2, 0)
    told = summary.describe()
    assert "         1 reference solutions pass their tests" in told
    assert "2 problems left out: their solution does not pass their tests, such as " in told
    assert "line 2 has a solution that does not pass its tests, in solution: test 1 of 2" in told


@pytest.mark.parametrize("name", ROWS)
def test_every_shape_of_tests(prepared, name):
    columns = {"prompt": f"Problem {name}", "verifier": "code", **ROWS[name]}
    summary, problems = prepared([{**columns, "solution": RIGHT[name][0]}])
    assert (summary.solved, len(problems)) == (1, 1)
    with pytest.raises(DataError, match="1 of 1 problems are not solved by their own"):
        prepared([{**columns, "solution": next(filter(None, WRONG[name]))}])


@pytest.mark.parametrize(
    "solution",
    [
        ADD,
        f"It is:\n```python\n{ADD}\n```\n",
        f"'''\n```\n````\n'''\n{ADD}",
        [ADD],
        [MULTIPLY, ADD],
        json.dumps([MULTIPLY, ADD]),
        {"language": [2, 1, 3], "solution": ["int main() {}", "print 3", ADD]},
        f"[print(x) for x in [0]] and 0\n{ADD}".replace("print(x)", "x"),
    ],
)
def test_a_solution_may_be_any_of_these(prepared, solution):
    summary, _ = prepared([row(1, solution)])
    assert summary.solved == 1


def test_a_list_of_which_none_passes(prepared):
    with pytest.raises(DataError, match="has 2 solutions that do not pass its tests, in solution:"):
        prepared([row(1, [MULTIPLY, "print(3)"])])
    many = [MULTIPLY] * solutions.MAX_SOLUTIONS + [ADD]
    with pytest.raises(DataError, match="1 of 1 problems are not solved"):
        prepared([row(1, many)])


def test_the_body_of_the_prompts_function(prepared):
    human = {"verifier": "code", **ROWS["humaneval"]}
    body = (
        "    return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b in numbers[:i])"
    )
    assert prepared([{**human, "solution": body}])[0].solved == 1
    with pytest.raises(DataError, match="1 of 1 problems"):
        prepared([{**human, "solution": "    return True"}])


def test_rows_of_other_verifiers_are_not_run(prepared):
    math = {"prompt": "What is 1+1?", "answer": "2", "solution": "It is 2.", "verifier": "math"}
    summary, problems = prepared([row(1, ADD), math], skip_unusable=True)
    assert len(problems) == 2 and (summary.solved, summary.unsolved) == (1, 0)
    with pytest.raises(DataError, match="--solution-column=solution: no problem has a program of"):
        prepared([math])


def test_the_column_may_be_left_out_of_the_output(prepared):
    summary, problems = prepared([row(1, ADD, hint="h")], dropped=["solution"])
    assert problems[0].metadata.keys() == {"input_output", "hint"} and summary.solved == 1
    assert prepared([row(1, ADD)])[1][0].metadata["solution"] == ADD
    with pytest.raises(DataError, match="--drop-columns all leaves no tests for --solution-column"):
        prepared([row(1, ADD)], dropped=[ALL])


def test_progress_is_shown(prepared, monkeypatch):
    shown = []
    monkeypatch.setattr(solutions, "_CHUNK", 2)
    monkeypatch.setattr(ProgressBar, "show", lambda bar, *count: shown.append((bar._title, *count)))
    prepared([row(i, ADD) for i in range(5)])
    counts = [count for title, *count in shown if title == "solutions run"]
    assert counts == [[2, 5], [4, 5], [5, 5]]


def test_through_the_tool(tmp_path, tokenizer_directory, capsys):
    rows = [row(1, MULTIPLY), row(2, ADD)]
    given = ["--data", str(jsonl(tmp_path / "rows.jsonl", rows)), "--without-answers"]
    given += ["--template", "none", "--tokenizer", str(tokenizer_directory)]
    given += ["--out", str(tmp_path / "out.parquet"), "--solution-column", "solution"]
    assert command.main(given) == 2
    assert "line 1 has a solution that does not pass its tests" in capsys.readouterr().err
    assert command.main([*given, "--skip-unusable"]) == 0
    assert "1 reference solutions pass their tests" in capsys.readouterr().out
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert table["prompt"].to_pylist() == ["Problem 2"]

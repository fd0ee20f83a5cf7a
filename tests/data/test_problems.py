"""Reading problems from files, and what a broken file says.

Not exercised: files larger than memory, other compressions than parquet's default.
"""

import json
import sys

import pyarrow
import pyarrow.parquet
import pytest

from vapo_megatron.data.problems import Problem, load_problems
from vapo_megatron.errors import DataError


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def row(prompt="p", answer="1", **more):
    return json.dumps({"prompt": prompt, "answer": answer, **more})


def test_jsonl_keeps_order_duplicates_and_text(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        row("b", " 2 "),
        row("a", "1", id=7),
        "",
        row("b", "2"),
        row("\u00e9", "3"),
    )
    expected = [
        Problem("b", "2"), Problem("a", "1", {"id": 7}), Problem("b", "2"), Problem("\u00e9", "3")
    ]  # fmt: skip
    assert load_problems(path) == expected
    assert load_problems(str(path)) == expected


def test_numbers_become_text_without_an_exponent(tmp_path):
    answers = [12, -3, 0.5, 1e-7, 2e21, 10**30]
    path = write(tmp_path / "a.jsonl", *[row("p", answer) for answer in answers])
    found = [problem.answer for problem in load_problems(path)]
    assert found == ["12", "-3", "0.5", "0.0000001", "2" + "0" * 21, "1" + "0" * 30]


def test_columns_can_be_named(tmp_path):
    path = write(
        tmp_path / "a.jsonl", json.dumps({"question": "q", "solution": "s", "answer": "x"})
    )
    assert load_problems(path, "question", "solution") == [Problem("q", "s", {"answer": "x"})]


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + row().encode() + b"\n")
    assert load_problems(path) == [Problem("p", "1")]


def test_parquet_gives_what_jsonl_gives(tmp_path):
    problems = [{"prompt": f"p{i}", "answer": str(i), "other": [i]} for i in range(1000)]
    table = pyarrow.Table.from_pylist(problems)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    path = write(tmp_path / "a.jsonl", *[json.dumps(problem) for problem in problems])
    assert load_problems(tmp_path / "a.parquet") == load_problems(path)
    numbers = pyarrow.table({"prompt": ["a", "b"], "answer": [1.5, 2.0]})
    pyarrow.parquet.write_table(numbers, tmp_path / "b.parquet")
    assert load_problems(tmp_path / "b.parquet") == [Problem("a", "1.5"), Problem("b", "2")]


def test_the_critic_may_have_a_prompt_of_its_own(tmp_path):
    path = write(tmp_path / "a.jsonl", row("p", hint="p, 1"), row("q", hint="q, 1"))
    own, hinted = {"critic_prompt_column": "hint"}, ["p, 1", "q, 1"]
    found = load_problems(path, **own)
    assert [problem.critic_prompt for problem in found] == hinted
    assert [problem.metadata["hint"] for problem in found] == hinted, "a verifier sees it, too"
    assert [problem.prompt for problem in found] == ["p", "q"]
    assert load_problems(path)[0].critic_prompt is None
    write(path, row("p", hint="h"), row("q"))
    with pytest.raises(DataError, match="line 2 has no column 'hint'; set data.critic_prompt_col"):
        load_problems(path, **own)
    write(path, row("p", hint=""))
    with pytest.raises(DataError, match="hint='' must be a non-empty string"):
        load_problems(path, **own)


def test_a_row_that_hybrid_gives_to_a_verifier_keeps_its_columns():
    row = Problem("p", "1", {"tolerance": 2, "verifier": "hybrid"}, "a")
    assert row.judged_by("math") == Problem("p", "1", {"tolerance": 2, "verifier": "math"}, "a")


def test_a_source_has_its_name_its_columns_and_its_verifier(tmp_path):
    rows = [{"q": "a", "a": 1, "verifier": "exact"}, {"q": "b", "a": 2, "verifier": None}]
    path = write(tmp_path / "a.jsonl", *map(json.dumps, [*rows, {"q": "c", "a": 3}]))
    problems = load_problems(path, "q", "a", source="code", verifier="code")
    assert [(p.prompt, p.answer, p.source) for p in problems] == [
        ("a", "1", "code"), ("b", "2", "code"), ("c", "3", "code")
    ]  # fmt: skip
    assert [p.verifier for p in problems] == ["exact", "code", "code"]
    assert [p.verifier for p in load_problems(path, "q", "a")] == ["exact", None, None]
    with pytest.raises(DataError, match="no column 'x'; set data.sources.code.answer_column to"):
        load_problems(path, "q", "x", source="code")


@pytest.fixture
def any_digits():
    """Integers of any length are read in this process, as the verifier of programs has it."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(limit)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "p", ', "is not JSON .* each line must be one JSON object"),
        (b'{"prompt": "p", "answer": ' + b"1" * 5000 + b"}", "is not JSON .an integer of 5000 "),
        (b'{"prompt": "p", "answer": "1", "answer": "2"}', "the key 'answer' stands twice"),
        (b'{"prompt": "p", "answer": "1", "a": [{"b": 1, "b": 1}]}', "the key 'b' stands twice"),
        (b'["p", "1"]', "is a list; each line must be one JSON object"),
        (b'{"prompt": "\xff", "answer": "1"}', "is not UTF-8 .* save it as UTF-8"),
        (
            b'{"prompt": "p", "id": 3}',
            "no column 'answer'; set data.answer_column to one of those it has: prompt, id",
        ),
        (
            b'{"question": "p", "answer": 3}',
            "no column 'prompt'; set data.prompt_column to one of those it has: question, answer",
        ),
        (b"{}", "no column 'prompt'; .*: none"),
        (b'{"prompt": "\\ud800", "answer": "1"}', "prompt contains half of a surrogate pair"),
        (b'{"prompt": "p", "answer": "\\udfff"}', "answer contains half of a surrogate pair"),
        (b'{"prompt": "", "answer": "1"}', "prompt='' must be a non-empty string"),
        (b'{"prompt": ["p"], "answer": "1"}', r"prompt=\['p'\] must be a non-empty string"),
        (
            b'{"prompt": "p", "answer": -Infinity}',
            "answer=-inf must be a finite number or a text, found a float",
        ),
        (b'{"prompt": "p", "answer": true}', "answer=True must .* a bool; write the word"),
        (b'{"prompt": "p", "answer": [3, 5]}', "two numbers, .* interval .* correct or remove the"),
    ],
)
def test_a_bad_line_is_named_with_a_remedy(tmp_path, line, message, any_digits):
    path = tmp_path / "a.jsonl"
    path.write_bytes(row().encode() + b"\n\n" + line + b"\n")
    with pytest.raises(DataError, match=f"a.jsonl, line 3.*{message}"):
        load_problems(path)


def test_a_bad_parquet_row_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    answers = [b"1"] * 10
    answers[6] = b"\xff"
    table = pyarrow.table({"prompt": ["p"] * 10, "answer": answers})
    pyarrow.parquet.write_table(table, path, row_group_size=4)
    with pytest.raises(
        DataError, match=r"a.parquet, row 6: answer=b'.xff' must be a text, found bytes"
    ):
        load_problems(path)
    with pytest.raises(
        DataError, match="no column 'question'; set data.prompt_column.*prompt, answer"
    ):
        load_problems(path, "question")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_an_empty_data_set_is_refused(tmp_path, name):
    if name == "a.jsonl":
        write(tmp_path / name, "", "")
    else:
        table = pyarrow.table(
            {"prompt": pyarrow.array([], "str"), "answer": pyarrow.array([], "str")}
        )
        pyarrow.parquet.write_table(table, tmp_path / name)
    with pytest.raises(DataError, match=f"{name} has no problems; give a file"):
        load_problems(tmp_path / name)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="does not exist; give the path"):
        load_problems(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"end in .jsonl or .parquet, found '.csv'; convert"):
        load_problems(write(tmp_path / "a.csv", "prompt,answer"))
    with pytest.raises(DataError, match="not a readable parquet file"):
        load_problems(write(tmp_path / "a.parquet", "PAR1 but not really"))
    with pytest.raises(DataError, match="is a directory; give the path of one file"):
        (tmp_path / "parts.parquet").mkdir()
        load_problems(tmp_path / "parts.parquet")


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
    table = pyarrow.table([["p"], ["1"], ["2"]], names=["prompt", "answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="a.parquet has two columns 'answer'; rename or remove"):
        load_problems(tmp_path / "a.parquet")


def test_prompts_are_no_ground_truths(tmp_path):
    path = write(tmp_path / "a.jsonl", row())
    with pytest.raises(
        DataError, match=r"data.answer_column=prompt must be another column than data.prompt_column"
    ):
        load_problems(path, answer_column="prompt")
    with pytest.raises(DataError, match=r"^evaluation.sources.b.answer_column=answer must be"):
        load_problems(path, "answer", section="evaluation", source="b")

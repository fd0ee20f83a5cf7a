"""The table that a selection's rows become: which columns of a JSONL file it refuses, and how.

Not exercised: what is measured and written (test_select.py).
"""

import json

import pyarrow
import pyarrow.parquet
import pytest

from tests import jsonl
from vapo_megatron.cli.select.table import source_table
from vapo_megatron.config import DataConfig
from vapo_megatron.data.problems import load_problems
from vapo_megatron.errors import DataError


def table_of(path, values, **missing):
    """The table of rows with these values in column x, behind an empty line; line 2 is first."""
    rows = [{"prompt": "p", "answer": i, "x": value} for i, value in enumerate(values)]
    path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    return source_table(path, DataConfig(train_path=str(path)), load_problems(path))


@pytest.mark.parametrize(
    ("values", "types", "lines"),
    [
        ([0, 1, None, "hard"], ("int64", "string"), (2, 5)),
        ([None, "hard", 0], ("string", "int64"), (3, 4)),
        ([*[0] * 100, "hard", *[1] * 100], ("int64", "string"), (2, 102)),
        ([1, True], ("int64", "bool"), (2, 3)),
        ([False, 1.5], ("bool", "double"), (2, 3)),
        # A double holds no whole number of this size.
        ([2**60 + 1, 0.5], ("int64", "double"), (2, 3)),
        (["a", ["a"]], ("string", "list<item: string>"), (2, 3)),
        ([[1], ["a"]], ("list<item: int64>", "list<item: string>"), (2, 3)),
        ([{"a": 1}, {"a": "1"}], ("struct<a: int64>", "struct<a: string>"), (2, 3)),
        ([{"a": 1}, "a"], ("struct<a: int64>", "string"), (2, 3)),
    ],
)
def test_two_types_are_named_with_their_lines(tmp_path, values, types, lines):
    with pytest.raises(DataError) as caught:
        table_of(tmp_path / "a.jsonl", values)
    first, second = (f"{of} in line {line}" for of, line in zip(types, lines))
    assert f"a.jsonl: column 'x' is {first} and {second}, but a column of a" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (["a", "b", "\ud800", "c"], "surrogates not allowed"),
        ([1, 2, 2**64, 3], "too large"),
        ([None, None, [1, "a"]], "Could not convert 'a' with type str"),
        ([None, None, {"a": {"\ud800": 1}}], "surrogates not allowed"),
        ([None, None, {}], "no child field"),
    ],
)
def test_a_value_that_no_column_can_have_is_named_with_its_line(tmp_path, values, reason):
    with pytest.raises(DataError) as caught:
        table_of(tmp_path / "a.jsonl", values)
    message = str(caught.value)
    assert "a.jsonl, line 4: column 'x' cannot be stored in a parquet file (" in message
    assert reason in message and message.isascii() and "\n" not in message


def test_the_name_of_a_column_is_checked_too(tmp_path):
    path = tmp_path / "a.jsonl"
    jsonl.write(path, [{"prompt": "p", "answer": 1, "\ud800": 1}])
    with pytest.raises(DataError, match=r"line 1: column '\\ud800' cannot be stored in a parquet"):
        source_table(path, DataConfig(train_path=str(path)), load_problems(path))


def test_rows_with_other_columns_and_whole_numbers_among_fractions_are_one_table(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [
        {"prompt": "p", "answer": 1, "x": 1, "more": {"a": 1}},
        {"prompt": "q", "answer": "b", "y": ["t"]},
        {"prompt": "r", "answer": 0.5, "x": 0.5, "more": {"b": None}},
    ]
    jsonl.write(path, rows)
    table = source_table(path, DataConfig(train_path=str(path)), load_problems(path))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert table.to_pydict() == {
        "prompt": ["p", "q", "r"], "answer": ["1", "b", "0.5"], "x": [1.0, None, 0.5],
        "more": [{"a": 1, "b": None}, None, {"a": None, "b": None}], "y": [None, ["t"], None],
    }  # fmt: skip

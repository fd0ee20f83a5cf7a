"""Ground truths of any type: the text that is compared, or what is wrong and where."""

import datetime
import decimal

import numpy
import pyarrow
import pyarrow.parquet
import pytest

from vapo_megatron.data.ground_truths import answer_text, members
from vapo_megatron.data.problems import load_problems
from vapo_megatron.errors import DataError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (" 3 ", "3"), (42, "42"), (42.0, "42"), (-0.0, "0"), (1e-7, "0.0000001"), (2.5, "2.5"),
        (6.02e23, "602000000000000000000000"), ([1e23], "[100000000000000000000000]"),
        (decimal.Decimal("2.50"), "2.50"), (decimal.Decimal("1E+3"), "1000"), (b"42", "42"),
        (None, ""), (float("nan"), ""), (decimal.Decimal("NaN"), ""), ("  ", ""), ([], ""),
        ({}, ""), (["3", "5"], '["3", "5"]'), ([42.0], "[42]"), ({"answer": 0.5, "other": None},
        '{"answer": 0.5}'), ([1, 2, 3], "[1, 2, 3]"), ([[1, 2], [3, 4]], "[[1, 2], [3, 4]]"),
    ],
)  # fmt: skip
def test_a_value_has_one_text(value, text):
    assert answer_text(value, "answer", "f, row 3") == text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "answer=True must be a finite number or a text, found a bool; write the word"),
        ([3, 5], r"answer=\[3, 5\] is a list of two numbers, .*interval.*'3, 5' .two answers"),
        (float("inf"), "answer=inf must be a finite number"),
        (decimal.Decimal("Infinity"), "found a Decimal"),
        (b"\xff", "bytes that are not UTF-8"),
        (datetime.date(2020, 1, 1), "found a date"),
        ([datetime.date(2020, 1, 1)], "holds a date"),
        ("\udfff", "half of a surrogate pair"),
    ],
)
def test_a_value_without_a_text_is_refused_by_row_and_value(value, message):
    with pytest.raises(DataError, match=f"^f, row 3: .*{message}.*; correct or remove the row"):
        answer_text(value, "answer", "f, row 3")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('["42"]', ["42"]), ('["3","5"]', ["3", "5"]), ("['3', '5']", ["3", "5"]),
        ("('3', 5)", ["3", "5"]), ("{'5', '3'}", ["3", "5"]), ('[["42"]]', ["42"]),
        ('["[\\"42\\"]"]', ["42"]), ('"[\\"3\\", \\"5\\"]"', ["3", "5"]), ("[42]", ["42"]),
        ("[[42.0]]", ["42"]), ("array(['3', '5'], dtype=object)", ["3", "5"]),
        ("array([3, 5])", ["3", "5"]), ("b'42'", ["42"]), ('"42"', ["42"]),
        ("{'answer': 42}", ["42"]), ('{"ground_truth": "[\\"42\\"]", "style": "rule"}', ["42"]),
        ('{"answer": {"value": 1e-07}}', ["0.0000001"]), ("{'answer': 1e23}", ["1" + "0" * 23]),
        ('{"target": ["3", "5"]}', ["3", "5"]),
        ('["(1,2)", "\\\\frac{1}{2}"]', ["(1,2)", "\\frac{1}{2}"]), ("['\\pi', 2]", ["\\pi", "2"]),
        # Notation of mathematics, and texts.
        ("[3, 5]", ["[3, 5]"]), ("(3, 5)", ["(3, 5)"]), ("{1, 2}", ["{1, 2}"]), ("{a}", ["{a}"]),
        ("[[1, 2], [3, 4]]", ["[[1, 2], [3, 4]]"]), ("\\{1, 2\\}", ["\\{1, 2\\}"]), ("", [""]),
        ("[x]", ["[x]"]), ("'a' or 'b'", ["'a' or 'b'"]), ("(-\\infty, 3]", ["(-\\infty, 3]"]),
    ],
)  # fmt: skip
def test_lists_and_dicts_as_text_are_unpacked(text, found):
    assert members(text) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["3", "5"', "looks like a list or a dict, but"),
        ("[np.float64(3.0), np.str_('5')]", "looks like a list or a dict, but"),
        ("[Decimal('3')]", "looks like a list or a dict, but"),
        ("[array(['3'], dtype=object)]", "looks like a list or a dict, but"),
        ("{'x': 1}", "a dict with the keys x: exactly one of answer, "),
        ("{'answer': 1, 'value': 2}", "exactly one of"),
        ("{'answer': None}", "exactly one of"),
        ('["3", null]', "lists None, which is not one answer"),
        ('["3", ["4", "5"]]', r"lists \['4', '5'\]"),
        ('["3", ""]', "lists an empty text"),
        ("[true]", "found a bool"),
        ("{'answer': [1, 2]}", "two numbers"),
        (r'["\frac{1}{2}"]', "control characters .* backslash was written once"),
    ],
)
def test_what_cannot_be_unpacked_is_said(text, message):
    with pytest.raises(ValueError, match=message):
        members(text)


def test_columns_have_the_digits_of_their_own_type(tmp_path):
    tenth, f32 = [0.1, None], pyarrow.float32()
    columns = {
        "f32": pyarrow.array(tenth, f32),
        "f16": pyarrow.array([numpy.float16(0.1), None]),
        "f64": pyarrow.array(tenth),
        "decimal": pyarrow.array([decimal.Decimal("2.50"), None], pyarrow.decimal128(10, 2)),
        "binary": pyarrow.array([b"7", None]),
        "list": pyarrow.array([tenth, None], pyarrow.list_(f32)),
        "fixed": pyarrow.array([tenth, None], pyarrow.list_(f32, 2)),
        "struct": pyarrow.array([{"answer": 0.1}, None], pyarrow.struct({"answer": f32})),
        "map": pyarrow.array([[("a", 0.1)], None], pyarrow.map_(pyarrow.string(), f32)),
        "dictionary": pyarrow.array(tenth, f32).dictionary_encode(),
    }
    table = pyarrow.table({"prompt": ["p", "q"], **columns})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    expected = {"decimal": "2.50", "binary": "7", "list": "[0.1, null]", "fixed": "[0.1, null]",
                "struct": '{"answer": 0.1}'}  # fmt: skip
    for name in columns:
        if name != "map":
            first, second = load_problems(tmp_path / "a.parquet", answer_column=name)
            assert (first.answer, second.answer) == (expected.get(name, "0.1"), "")
    assert first.metadata["map"] == [("a", 0.1)] and first.metadata["list"] == tenth

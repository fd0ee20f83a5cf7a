"""Tests of a problem as data sets have them, and outputs compared. No program runs here."""

import base64
import json
import pickle
import zlib
from collections import deque
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction

import pytest

from vapo_megatron.reward.code_outputs import same_text, same_value
from vapo_megatron.reward.code_tests import (
    AssertTest,
    CallTest,
    ScriptTest,
    check_names,
    given_code,
    read_tests,
)
from vapo_megatron.reward.verifier import Problem
from vapo_megatron.sandbox.plain_values import decode, encode

TACO = {"inputs": ["1 2\n", ["3 4", "5"]], "outputs": ["3\n", ["12", "x"]]}
CASES = [
    {"input": "1\n", "output": "2", "testtype": "stdin"},
    {"input": '[1, 2]\n"a"', "output": "[2]", "testtype": "functional"},
]
MBPP = {"test_list": ["assert f(1) == 2", "assert f(2) == 3"]}
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n"


def packed(value):
    """As LiveCodeBench packs private tests."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def read(answer="", **columns):
    return read_tests(Problem("", answer, columns))


def test_inputs_and_outputs():
    expected = [ScriptTest("1 2\n", "3\n"), ScriptTest("3 4\n5", "12\nx")]
    assert read(input_output=TACO) == read(input_output=json.dumps(TACO)) == expected
    assert read(json.dumps(TACO)) == read(tests=TACO) == expected
    assert read(input_output=TACO | {"fn_name": None}) == expected


def test_calls():
    calls = {"inputs": [[1, [2]], ["x"]], "outputs": [[3], ["y"]], "fn_name": "f"}
    expected = [CallTest("f", [1, [2]], [3], True), CallTest("f", ["x"], ["y"], True)]
    assert read(input_output=calls) == expected
    calls |= {"inputs": ["1\n[2]", '"x"'], "outputs": ["[3, 4]", "5"]}
    assert read(input_output=calls) == [CallTest("f", [1, [2]], [3, 4]), CallTest("f", ["x"], 5)]


@pytest.mark.parametrize("columns", [{"fn_name": "f"}, {"metadata": '{"func_name": "f"}'}])
def test_public_and_private_cases(columns):
    first, second = ScriptTest("1\n", "2"), CallTest("f", [[1, 2], "a"], [2])
    for private in (json.dumps(CASES[1:]), packed(json.dumps(CASES[1:])), CASES[1:]):
        found = read(public_test_cases=json.dumps(CASES[:1]), private_test_cases=private, **columns)
        assert found == [first, second]
    assert read(json.dumps(CASES), **columns) == [first, second]


def test_asserts():
    f = frozenset(["f"])
    assert read(**MBPP) == [AssertTest("assert f(1) == 2", f), AssertTest("assert f(2) == 3", f)]
    with_setup = read(test_setup_code="import math", test_imports=["import re"], **MBPP)
    assert with_setup[1] == AssertTest("import math\nimport re\nassert f(2) == 3", f)
    two = "assert f(1) == 2\nassert f(2)"
    assert read(two) == [AssertTest(two, f)]
    assert read('["assert f(1) == 2"]') == [AssertTest("assert f(1) == 2", f)]


F, IS_CLOSE = {"entry_point": "f"}, "def is_close(a, b): return a == b\n"


@pytest.mark.parametrize(
    ("tests", "columns", "functions", "left_open"),
    [
        (["assert f(1) == 2"], {}, "f", ""),
        (["assert f(1) == 2", "assert f(2) == g"], {}, "f", "g"),
        (["assert is_close(f(1), 2)"], {}, "", "f is_close"),
        (["assert is_close(f(1), 2)"], F, "f", "is_close"),
        (["assert is_close(f(1), 2)"], {"entry_point": "f, is_close"}, "f is_close", ""),
        (["assert is_close(f(1), 2)"], {"test_setup_code": IS_CLOSE}, "f", ""),
        (["assert is_close(f(1), 2)"], {"starter_code": IS_CLOSE}, "f", ""),
        (["assert f(1) == 2", "assert is_close(f(1), 2)"], {}, "f", "is_close"),
        (["assert f(1) == 2", "assert g(2) == 3", "assert f(g(1)) == 2"], {}, "f g", ""),
        (["assert g(1) == 2", "assert f(1) == 2"], F, "f g", ""),
        (["r = f(1)\nassert same(r, 2)"], {}, "", "f same"),
        (["assert abs(f(1)) == 2"], {}, "f", ""),
        (["assert sum(10, 15) == 6", "assert sum(1, 2) == 3"], {}, "sum", ""),
        (["assert sum(10, 15) == 6"], {"entry_point": "sum"}, "sum", ""),
        (["assert list(map(f, [1])) == [2]"], {}, "f", ""),
        (["assert sorted([2, 1], key=f) == [1, 2]"], {}, "f", ""),
        (["assert bool(done)"], {}, "", "done"),
        (["from math import *\nassert isclose(f(1), 2)"], {}, "f", ""),
        (["from solution import f\nassert same(f(1), 2)"], {}, "", "same"),
        (["import solution\nassert same(solution.f(1), 2)"], {}, "", "same"),
        (["from solution import f\nassert f(1) == 2\nassert g(1) == 2"], {}, "g", ""),
        (["assert f(1) == 2"], {"entry_point": "Solution().f"}, "Solution f", ""),
        (["assert f(1) == 2"], {"starter_code": "def f(x):\n    return x - 1"}, "f", ""),
        (["assert g(f(1))"], {"starter_code": "def f(x): return g(x)\ndef g(x): return 1"}, "",
         "f g"),
    ],
)  # fmt: skip
def test_whose_the_names_in_a_test_are(tests, columns, functions, left_open):
    found = read(test_list=tests, **columns)
    for test in found:
        assert test.functions == set(functions.split())
        assert test.open == set(left_open.split())
    refused = check_names(found)
    assert (refused is None) == (not left_open)
    if left_open:
        assert f"leave {', '.join(left_open.split())} open: the program's are only" in refused


@pytest.mark.parametrize(
    ("prompt", "columns", "code"),
    [
        ("def f(x):\n    pass\n", {}, "def f(x):\n    pass"),
        ("Do:\n```python\nimport math\nprint(1)\ndef f(x):\n    pass\n```\n", {},
         "import math\n\ndef f(x):\n    pass"),
        ("Say what 1+1 is.", {"prompt": "import math\n"}, "import math"),
        ("Word", {"starter_code": "class A:\n    pass"}, "class A:\n    pass"),
        ("assert f(1) == 2", {"starter_code": "class A:\n    def f(self):\n        "}, ""),
        ("Do:\n```python\nassert f(1) == 2\n```", {}, ""),
    ],
)  # fmt: skip
def test_the_rows_own_code(prompt, columns, code):
    assert given_code(Problem(prompt, "", columns)).split() == code.split()


def test_a_check_and_functions_are_called():
    (test,) = read(test=CHECK, entry_point="f")
    assert test.text == CHECK + "\ncheck(candidate_of_the_program('f'))"
    (test,) = read(test="from solution import f\n\ndef test_one():\n    assert f(1) == 2\n")
    assert test.text.endswith("\ntest_one()")


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({}, "has no tests: no ground truth, and none of input_output, public_test_cases"),
        ({"input_output": '{"inputs": []'}, "in input_output that cannot be read: '{"),
        ({"input_output": "{}"}, "in input_output that cannot be read: no 'inputs'"),
        ({"public_tests": {"input": ["1"]}}, "in public_tests that cannot be read: no 'output'"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, "1 inputs for 0 outputs"),
        ({"input_output": {"inputs": [], "outputs": []}}, "has no tests in input_output"),
        ({"tests": [{"input": "1"}]}, "in tests that cannot be read: no 'output'"),
        ({"tests": [1]}, "in tests that cannot be read: 'int' object has no attribute 'get'"),
        ({"tests": CASES[1:]}, "no function to call: none of the columns fn_name, "),
        ({"tests": [CASES[0] | {"testtype": "file"}]}, "testtype='file' is neither stdin nor "),
        ({"tests": 5}, "a int is no list of tests"),
        ({"test_list": ["f(1)"]}, "'f(1)' has no assert statement"),
        ({"test_list": ["assert f("]}, "is neither JSON nor Python: '(' was never closed, line 1"),
        ({"test": CHECK}, "no function to call"),
        ({"test": "def helper():\n    assert f(1)"}, "whose assert statements are never rea"),
        ({"private_test_cases": packed(json.dumps)}, "json.dumps is no text"),
        ({"private_test_cases": packed(5)}, "packed, but a int, no text"),
        ({"tests": "[" * 200_000}, "in tests that cannot be read"),
        ({"test": "assert 1 == 1"}, "has tests that call no function of the program"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_judged_are_refused(columns, reason):
    with pytest.raises(ValueError) as error:
        read(**columns)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1 2\n3\n", "1  2\n3", True),
        ("\n1\n\n2\n", "1\n2", True),
        ("1\n2", "1 2", False),
        ("1", "1 2", False),
        ("Yes", "YES", False),
        ("1.0", "1", True),
        ("2", "1", False),
        ("0.3333333", "0.33333333", True),
        ("0.33", "0.3333", False),
        ("1.0000001", "1", False),
        ("100000001", "100000000", False),
        ("1e-9", "0.0", True),
        ("nan", "0.5", False),
        ("inf", "1e400", False),
        ("snan", "1.5", False),
        ("9" * 500, "9" * 499 + "8", False),
        ("", "1", False),
        ("", "", True),
    ],
)
def test_same_text(found, expected, same):
    assert same_text(found, expected, 1e-6) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ((1, 2), [1, 2], True),
        ([(1,), [2]], [[1], [2]], True),
        ({1: (2,)}, {"1": [2]}, True),
        ({1: 2}, {"1": 2, "2": 3}, False),
        (0.1 + 0.2, 0.3, True),
        (3, 3.0, True),
        (10**400, 1.5, False),
        (3.0000001, 3, False),
        ({1, 2}, [1, 2], False),
        ("12", ["1", "2"], False),
        (None, None, True),
        (None, 0, False),
        ([[1]], [[2]], False),
    ],
)
def test_same_value(found, expected, same):
    assert same_value(found, expected, 1e-6) is same


def test_plain_values_arrive_as_they_were():
    values = [
        deque([1, (2,)]), Decimal("0.10"), Fraction(1, 3), datetime(2020, 1, 2, 3, 4, 5, 6),
        date(2020, 1, 2), time(3, 4), timedelta(-1, 2, 3),
        None, True, 1, 10**50, 0.1, "\ud800a", b"\xff", bytearray(b"x"), 1 + 2j, range(1, 9, 2),
        [1, [2]], (1, (2,)), {1, "a"}, frozenset([(1,)]), {(1, 2): [3], "a": {"tuple": 1}},
    ]  # fmt: skip
    arrived = decode(json.loads(json.dumps(encode(values))))
    assert arrived == values and list(map(type, arrived)) == list(map(type, values))
    assert list(decode(encode(iter([1, (2,)])))) == [1, (2,)]


def test_what_has_behaviour_does_not_arrive_with_it():
    class Equal(str):
        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    arrived = decode(json.loads(json.dumps(encode([Equal("a"), (Equal("b"),)]))))
    assert arrived == ["a", ("b",)] and type(arrived[0]) is str and arrived != ["c", ("b",)]
    for value in (object(), Equal, len, [{"a": object()}]):
        with pytest.raises(TypeError, match="is no plain value"):
            encode(value)


class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next


def test_objects_of_classes_that_both_sides_have_cross_as_their_attributes():
    last = nodes = Node(0)
    for value in range(1, 50_000):
        nodes = Node((value,), nodes)
    last.next = nodes
    arrived = decode(json.loads(json.dumps(encode([nodes], {"Node"}))), {"Node": Node})[0]
    values, node = [], arrived
    while len(values) < 50_000:
        values.append(node.value)
        node = node.next
    assert node is arrived and values == [*[(value,) for value in range(49_999, 0, -1)], 0]
    for text in ('[["Node", {"next": {"object": 7}}]]', '[["Node", 5]]', '[["Other", {}]]'):
        with pytest.raises((ValueError, TypeError)):
            decode({"objects": json.loads(text)}, {"Node": Node})
    with pytest.raises((ValueError, TypeError)):
        decode({"objects": [["int", {"a": 1}]]}, {"int": int})


@pytest.mark.parametrize(
    "text",
    ['{"a": 1}', '{"list": [1]}', '{"tuple": 1}', '{"dict": [1]}', '{"set": [[1]]}', "{}",
     '{"fraction": ["1e99999999", 1]}', '{"fraction": [1, 0]}', '{"decimal": ["x"]}',
     '{"decimal": ["sNaN"]}', '{"date": [1]}', '{"timedelta": [9999999999]}', '{"objects": []}',
     '{"objects": [["A", {}]]}', '{"objects": [5]}', '{"objects": {"A": 1}}', '{"object": 0}',
     '{"bytes": 5}', '{"bytes": "x"}', '{"range": [1, 2, 0]}', '{"complex": ["a", 1]}'],
)  # fmt: skip
def test_what_nobody_encoded_is_refused(text):
    with pytest.raises((ValueError, TypeError)):
        decode(json.loads(text))

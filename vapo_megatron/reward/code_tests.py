"""Parses the tests of a programming problem from the formats of common data sets.

All become one of three kinds. Nothing is executed here.
"""

from __future__ import annotations

import ast
import base64
import binascii
import dataclasses
import io
import json
import pickle
import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from vapo_megatron.data.problems import Problem
from vapo_megatron.reward.code_names import Names, called, defined_names, names_of
from vapo_megatron.reward.fenced import last_block
from vapo_megatron.sandbox.inside import CANDIDATE, PROGRAMS_MODULE

COLUMNS = (
    "input_output", "public_test_cases", "private_test_cases", "test_cases", "public_tests",
    "private_tests", "generated_tests", "tests", "test_list", "test",
)  # fmt: skip
"""All of them are read that a row has; the ground truth where it has none."""
FUNCTION_COLUMNS = ("fn_name", "func_name", "entry_point")
SETUP_COLUMNS = ("test_setup_code", "test_imports")
CODE_COLUMNS = ("prompt", "starter_code")
"""Where, beside the problem's prompt, a row may have code that its program and tests rely on."""
LANGUAGES = ("python", "py", "pypy")


@dataclasses.dataclass(frozen=True)
class ScriptTest:
    """The program's standard output for a standard input."""

    text: str
    expected: str


@dataclasses.dataclass(frozen=True)
class CallTest:
    """What a function of the program returns."""

    function: str
    arguments: list[Any]
    expected: Any
    is_wrapped: bool = False
    """The expected value may be meant to be this list's only element."""


@dataclasses.dataclass(frozen=True)
class AssertTest:
    """A text of Python whose assert statements hold."""

    text: str
    functions: frozenset[str] = frozenset()
    """The names that are the program's."""
    open: frozenset[str] = frozenset()
    """Names that the row's tests leave to nobody; see code_names.py."""


Test = ScriptTest | CallTest | AssertTest


def read_tests(problem: Problem) -> list[Test]:
    """Return a problem's tests, in order.

    Raises:
        ValueError: what is wrong with the row, to be read after "the row".
    """
    columns = problem.metadata
    given = {name: columns[name] for name in COLUMNS if columns.get(name)}
    if "def check(" in str(given.get("test")):
        # LeetCode's data set has its tests a second time, without their types.
        given.pop("input_output", None)
    given = given or ({"ground truth": problem.answer} if problem.answer else {})
    if not given:
        raise ValueError(f"has no tests: no ground truth, and none of {', '.join(COLUMNS)}")
    tests = []
    for name, value in given.items():
        try:
            tests += _tests(value, columns)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"has tests in {name} that cannot be read: {reason}") from None
    if not tests:
        raise ValueError(f"has no tests in {', '.join(given)}")
    if not any(isinstance(test, AssertTest) for test in tests):
        return tests
    names = _names(problem, tests)
    if not names.tests_something and not names.open:
        raise ValueError("has tests that call no function of the program")
    return [
        dataclasses.replace(test, functions=names.functions, open=names.open)
        if isinstance(test, AssertTest)
        else test
        for test in tests
    ]


def check_names(tests: Sequence[Test]) -> str | None:
    """Return why no program can pass the tests, or None."""
    names = sorted({name for t in tests if isinstance(t, AssertTest) for name in t.open})
    if not names:
        return None
    return (
        f"has tests that leave {', '.join(names)} open: the program's are only functions that one "
        f"of the columns {', '.join(FUNCTION_COLUMNS)} names or a test imports from "
        f"{PROGRAMS_MODULE}; name or import them, or define others in {SETUP_COLUMNS[0]}"
    )


def given_code(problem: Problem) -> str:
    """Return the row's own code, such as a function to complete or a class ListNode, or "".

    It is a prompt that is Python as a whole, or the last block of Python in one.
    """
    for text in (problem.prompt, *(problem.metadata.get(name) for name in CODE_COLUMNS)):
        for code in (text, last_block(text, LANGUAGES)) if isinstance(text, str) else ():
            tree = parsed(code) if code else None
            if tree and any(isinstance(node, _DEFINITIONS) for node in tree.body):
                kept: list[ast.stmt]
                kept = [node for node in tree.body if isinstance(node, (*_DEFINITIONS, ast.Assign))]
                return ast.unparse(ast.Module(kept, []))
    return ""


_DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def parsed(text: str) -> ast.Module | None:
    """Return a text's syntax tree; None: it is no Python."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _names(problem: Problem, tests: Sequence[Test]) -> Names:
    texts = [test.text for test in tests if isinstance(test, AssertTest)]
    columns = [problem.metadata.get(name) for name in FUNCTION_COLUMNS]
    named = re.findall(r"[^\W\d]\w*", " ".join(str(value) for value in columns if value))
    return names_of(texts, named, defined_names(given_code(problem)) - set(named))


def _tests(value: Any, columns: Mapping[str, Any]) -> list[Test]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            unpacked = _unpacked(value)
            if unpacked is None:
                return [_whole_text(value, columns)]
            value = json.loads(unpacked)
    if isinstance(value, Mapping):
        return _parallel_lists(value, columns)
    if not isinstance(value, list):
        raise ValueError(f"a {type(value).__name__} is no list of tests")
    if all(isinstance(item, str) for item in value):
        setup = _setup(columns)
        return [_assertion(f"{setup}{text}") for text in value]
    return [_case(item, columns) for item in value]


def _parallel_lists(value: Mapping[str, Any], columns: Mapping[str, Any]) -> list[Test]:
    """TACO's and APPS's {"inputs": [...], "outputs": [...], "fn_name": ...}."""
    plural = "" if "input" in value else "s"  # CodeContests has no s.
    inputs, outputs = value[f"input{plural}"], value[f"output{plural}"]
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs for {len(outputs)} outputs")
    function = value.get("fn_name")
    if not function:
        return [ScriptTest(_lines(i), _lines(o)) for i, o in zip(inputs, outputs)]
    outputs = [_from_json(output) for output in outputs]
    # APPS puts every expected value into a list; another data set returns lists.
    is_wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    return [CallTest(function, _arguments(i), o, is_wrapped) for i, o in zip(inputs, outputs)]


def _case(case: Mapping[str, Any], columns: Mapping[str, Any]) -> Test:
    """LiveCodeBench's {"input": ..., "output": ..., "testtype": "stdin" | "functional"}."""
    kind = str(case.get("testtype") or case.get("type") or "stdin")
    if kind.startswith("std"):
        return ScriptTest(_lines(case["input"]), _lines(case["output"]))
    if not kind.startswith("func"):
        raise ValueError(f"testtype={kind!r} is neither stdin nor functional")
    function = _function({**columns, **case})
    return CallTest(function, _arguments(case["input"]), _from_json(case["output"]))


def _whole_text(text: str, columns: Mapping[str, Any]) -> AssertTest:
    """A text with asserts, check(candidate) as HumanEval has it, or functions test_..."""
    tree = _parsed(text)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    calls = [f"{f.name}()" for f in functions if f.name.startswith("test_") and not f.args.args]
    calls += [call for node in tree.body for call in _calls_of_class(node)]
    if any(function.name == "check" for function in functions):
        calls.append(f"check({CANDIDATE}({_function(columns)!r}))")
    checks = {function.name for function in functions if _asserts(function)}
    others = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    is_reached = any(_asserts(node) or checks & called(node) for node in others)
    if not calls and not is_reached:
        raise ValueError("a text whose assert statements are never reached")
    return _assertion("\n".join([_setup(columns) + text, *calls]))


def _calls_of_class(node: ast.stmt) -> list[str]:
    """Return the calls of a class's tests: unittest's, or pytest's class Test..."""
    if not isinstance(node, ast.ClassDef):
        return []
    if any("TestCase" in ast.unparse(base) for base in node.bases):
        names = f"__import__('unittest').defaultTestLoader.getTestCaseNames({node.name})"
        return [f"for _test in {names}: {node.name}(_test).debug()"]
    methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
    is_test = node.name.startswith("Test")
    return [f"{node.name}().{m}()" for m in methods if is_test and m.startswith("test_")]


def _assertion(text: str) -> AssertTest:
    if not _asserts(_parsed(text)):
        raise ValueError(f"{text[:80]!r} has no assert statement")
    return AssertTest(text)


def _asserts(tree: ast.AST) -> bool:
    """Return whether it has an assert statement, or a call such as self.assertEqual()."""
    return any(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.Attribute) and node.attr.startswith("assert"))
        for node in ast.walk(tree)
    )


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ValueError(
            f"{text[:80]!r} is neither JSON nor Python: {error.msg}, line {error.lineno}"
        ) from None


def _function(columns: Mapping[str, Any]) -> str:
    """Return the name of the function that is tested; LiveCodeBench has it in JSON."""
    more = columns.get("metadata")
    if isinstance(more, str):
        more = json.loads(more or "{}")
    places = [columns, more] if isinstance(more, Mapping) else [columns]
    for place in places:
        for name in FUNCTION_COLUMNS:
            if place.get(name):
                return str(place[name])
    raise ValueError(f"no function to call: none of the columns {', '.join(FUNCTION_COLUMNS)}")


def _setup(columns: Mapping[str, Any]) -> str:
    parts = []
    for name in SETUP_COLUMNS:
        value = columns.get(name) or ""
        parts.append(value if isinstance(value, str) else "\n".join(value))
    return "".join(f"{part}\n" for part in parts if part)


def _arguments(value: Any) -> list[Any]:
    """Return a call's arguments: a list of them, or one in each line, as JSON."""
    if isinstance(value, str):
        return [json.loads(line) for line in value.splitlines() if line.strip()]
    if not isinstance(value, list):
        raise ValueError(f"a call's input must be a list of arguments, found {value!r:.80}")
    return value


def _from_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _lines(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(_lines, value))
    return value if isinstance(value, str) else str(value)


def _unpacked(text: str) -> str | None:
    """Return LiveCodeBench's packed private tests as JSON, or None: it is no such text."""
    try:
        packed = zlib.decompress(base64.b64decode(text, validate=True))
    except (binascii.Error, zlib.error, ValueError):
        return None
    try:
        content = _TextUnpickler(io.BytesIO(packed)).load()
    except Exception as error:
        raise ValueError(f"packed, but not as LiveCodeBench does: {error}") from None
    if not isinstance(content, str):
        raise ValueError(f"packed, but a {type(content).__name__}, no text")
    return content


class _TextUnpickler(pickle.Unpickler):
    """Loads texts and numbers, and refuses everything that would run."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse."""
        raise pickle.UnpicklingError(f"{module}.{name} is no text")

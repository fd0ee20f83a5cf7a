"""Decides which names in a row's assert tests are functions of the program.

A test calls the function under test, and may call helpers. If every undefined name came from the
program, a program could redefine `is_close` to return True. A name is the program's if

1. the row names it (entry_point), or a test imports it from `solution`;
2. it is called, if only by map(), and is the only name that the tests of a row without such leave
   open (of builtins, such as MBPP's `sum`: the only one that all call, if none is open);
3. some assert calls it, and reads no other open name and no variable of the test.

No other name is: a test that needs one fails, and the row is refused.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

from vapo_megatron.sandbox.inside import CANDIDATE, PROGRAMS_MODULE
from vapo_megatron.sandbox.modules import STANDARD_MODULES

_BUILTINS = frozenset(dir(builtins))
_CALLERS = frozenset("map filter reduce starmap partial raises assertRaises".split())


class Names(NamedTuple):
    """What a row's tests read."""

    functions: frozenset[str]
    """The program's, by name; beside those that a test imports from `solution`."""
    open: frozenset[str]
    """Neither the program's nor bound by the tests, the row's code or Python."""
    tests_something: bool
    """Whether a test calls the program at all."""


def names_of(texts: Sequence[str], named: Collection[str], given: Collection[str] = ()) -> Names:
    """Return whose the names in a row's tests are.

    Args:
        texts: of the tests, which are valid Python.
        named: the functions that the row names.
        given: names that the row's own code defines.
    """
    trees = [ast.parse(text) for text in texts]
    unbound = {name for tree in trees for name in _read(tree) - _bound(tree)}
    unbound -= _BUILTINS - set(named) | {CANDIDATE}
    opened = unbound - (set(given) - set(named))
    if not named and not opened:
        # The row's code has the function itself, for instance to be mended.
        opened = unbound
    calls = [called(tree) for tree in trees]
    functions = set(named)
    for tree in trees:
        functions.update(_alone_in_an_assert(tree, opened))
    imports = set().union(*map(_from_program, trees))
    is_passed = any(CANDIDATE in each for each in calls)
    if not (named or imports) and len(opened) == 1:
        functions.update(opened.intersection(set().union(*calls)))
    if not (named or opened or imports or is_passed) and calls:
        in_all = _BUILTINS.intersection(*calls)
        functions.update(in_all if len(in_all) == 1 else ())
    tests_something = bool(imports) or is_passed or any(functions & each for each in calls)
    return Names(frozenset(functions), frozenset(opened - functions), tests_something)


def defined_names(code: str) -> set[str]:
    """Return what a row's own code binds at its top."""
    names: set[str] = set()
    for node in ast.parse(code).body:
        is_named = isinstance(node, ast.FunctionDef | ast.ClassDef)
        names |= {node.name} if is_named else _bound(node)  # type: ignore[attr-defined]
    return names


def _read(tree: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def called(tree: ast.AST) -> set[str]:
    """Return the names of functions that it calls by their bare names, or has called."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found.append(node.func)
            if (getattr(node.func, "attr", None) or getattr(node.func, "id", None)) in _CALLERS:
                found += node.args
            found += [keyword.value for keyword in node.keywords if keyword.arg == "key"]
    return {function.id for function in found if isinstance(function, ast.Name)}


def _bound(tree: ast.AST) -> set[str]:
    """Return the names that a text binds anywhere."""
    return _variables(tree) | {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in _imported(node)
    }


def _variables(tree: ast.AST) -> set[str]:
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return bound


def _imported(node: ast.Import | ast.ImportFrom) -> set[str]:
    names = {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    # Only what programs have loaded anyway is imported here.
    if isinstance(node, ast.ImportFrom) and "*" in names and node.module in STANDARD_MODULES:
        names.update(dir(importlib.import_module(node.module)))
    return names


def _from_program(tree: ast.AST) -> set[str]:
    """Return the names that a test imports from the program, or the module itself."""
    return {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module == PROGRAMS_MODULE
        or isinstance(node, ast.Import)
        and any(alias.name == PROGRAMS_MODULE for alias in node.names)
        for name in _imported(node)
    }


def _alone_in_an_assert(tree: ast.AST, opened: Collection[str]) -> set[str]:
    """Return the open names that an assert calls with values of its own alone."""
    variables = _variables(tree) | _from_program(tree) | {CANDIDATE}
    alone = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            read = _read(node)
            others = variables & read - _variables(node)
            if not others and len(found := read.intersection(opened)) == 1:
                alone |= found & called(node)
    return alone

"""What the confined processes do: run a program, serve calls of its functions, run a test.

Files 0 to 3 are standard input, output, errors, and what to run, as JSON: {"text": ..., "given":
code of the row, "functions": the program's, for a test}. A program that serves, and a test that
calls it, exchange one line of JSON for each call and one for each reply:

    {"call": "f", "arguments": VALUE, "keywords": VALUE}     {"returned": VALUE} or {"raised": TYPE,
                                                             "message": TEXT}

with each VALUE as plain_values.py has it. Only a test has a file for its result.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import gc
import io
import json
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable
from io import RawIOBase
from typing import Any, TextIO

from vapo_megatron.sandbox.plain_values import decode, encode

TEXT, INCOMING, OUTGOING, RESULT = 3, 4, 5, 6
PASSED = b"passed"
CANDIDATE = "candidate_of_the_program"
"""In a test: CANDIDATE(expression) is what the program has under it, to be called."""
PROGRAMS_MODULE = "solution"
"""In a test: a module with every name of the program."""
LEETCODE = """
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random, re
import string, sys
from typing import *
from functools import *
from collections import *
from itertools import *
from heapq import *
from bisect import *
from string import *
from operator import *
from math import *
from builtins import *
"""
"""Before a program with a class Solution, as LeetCode has it."""
_DEVICES = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
# Raised by what a test calls, they would end its loops, or itself, without an error.
_ENDS = (StopIteration, StopAsyncIteration)


def run() -> None:
    """Run the text as a script, from standard input to standard output."""
    module = _module("__main__")
    builtins.open = io.open = _open  # type: ignore[assignment]
    try:
        exec(_code(_text()["text"]), module.__dict__)
    finally:
        # As the interpreter ends a script, also one that raises.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _flush()


def serve() -> None:
    """Run the text as a module, then answer calls of its functions until there are no more."""
    module = _module("program")
    names = module.__dict__
    content = _text()
    if "\nclass Solution" in "\n" + content["text"]:
        exec(LEETCODE, names)
    classes = _run_given(content["given"], module)
    exec(_code(content["text"]), names)
    with (
        open(INCOMING, encoding="utf-8") as calls,
        open(OUTGOING, "w", encoding="utf-8") as replies,
    ):
        for line in calls:
            call = json.loads(line)
            own = {name: names[name] for name in classes if isinstance(names.get(name), type)}
            try:
                function = _find(call["call"], names)
                arguments, keywords = (
                    decode(call[part], own) for part in ("arguments", "keywords")
                )
                returned = encode(function(*arguments, **keywords), own)
                reply = json.dumps({"returned": returned})
            except Exception as error:
                traceback.print_exc()
                reply = json.dumps({"raised": type(error).__name__, "message": str(error)})
            print(reply, file=replies, flush=True)


def test() -> None:
    """Run the text; the names of functions that come with it are the program's."""
    # Opened here, in a process in which no text of a response ever runs.
    with open(INCOMING, encoding="utf-8") as replies, open(OUTGOING, "wb", buffering=0) as calls:
        content = _text()
        module = _module("test")
        classes = _run_given(content["given"], module)

        def candidate(expression: str) -> Callable[..., Any]:
            if expression.startswith("__"):  # What an import asks its module for.
                raise AttributeError(expression)
            return lambda *arguments, **keywords: _call(
                expression, arguments, keywords, calls, replies, classes
            )

        solution = types.ModuleType(PROGRAMS_MODULE)
        solution.__getattr__ = candidate  # type: ignore[method-assign]
        sys.modules[PROGRAMS_MODULE] = solution
        module.__dict__.update({name: candidate(name) for name in content["functions"]})
        module.__dict__[CANDIDATE] = candidate
        exec(compile(content["text"], "test.py", "exec"), module.__dict__)
    os.write(RESULT, PASSED)


def _run_given(code: str, module: types.ModuleType) -> dict[str, type]:
    """Run a row's own code, as far as it runs -> the classes that it defines, by name."""
    for node in ast.parse(code).body:
        if _is_to_be_written(node):
            continue
        with contextlib.suppress(Exception):
            exec(compile(ast.Module([node], []), "given.py", "exec"), module.__dict__)
    return {
        name: value
        for name, value in module.__dict__.items()
        if isinstance(value, type) and value.__module__ == module.__name__
    }


def _is_to_be_written(node: ast.stmt) -> bool:
    """Return whether a definition is there for the program to complete it."""
    if isinstance(node, ast.ClassDef):
        return node.name == "Solution"
    return isinstance(node, ast.FunctionDef) and all(
        isinstance(part, ast.Pass)
        or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        for part in node.body
    )


def _open(file: Any, *options: Any, **named: Any) -> Any:
    """Open as before, and standard files by their names too."""
    return _opens(_DEVICES.get(file, file) if isinstance(file, str) else file, *options, **named)


_opens = open


def _flush() -> None:
    """Write what the program's own file objects still hold, as the interpreter does at its end."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            with contextlib.suppress(Exception):
                thing.flush()


def _call(
    expression: str,
    arguments: Any,
    keywords: Any,
    calls: RawIOBase,
    replies: TextIO,
    classes: dict[str, type],
) -> Any:
    request = {
        "call": expression,
        "arguments": encode(arguments, classes),
        "keywords": encode(keywords, classes),
    }
    line = ""
    with contextlib.suppress(BrokenPipeError):
        calls.write(json.dumps(request).encode() + b"\n")
        line = replies.readline()
    if not line:
        # No exception, which a test could expect.
        print("the program has ended before its test", file=sys.stderr, flush=True)
        os._exit(1)
    reply = json.loads(line)
    if "returned" in reply:
        return decode(reply["returned"], classes)
    kind = getattr(builtins, str(reply["raised"]), None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, _ENDS):
        raise RuntimeError(f"{reply['raised']}: {reply['message']}"[:1000])
    raise kind(reply["message"])


def _find(expression: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Return a function by an expression; a bare name may be a method of a class Solution."""
    if expression not in names and expression.isidentifier() and "Solution" in names:
        return getattr(names["Solution"](), expression)
    return eval(expression, names)


def _module(name: str) -> types.ModuleType:
    """Return an empty module for the text, with the interpreter around it as for a script."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.path[:], sys.argv[:] = [], [f"{name}.py"]
    sys.meta_path.clear()  # So that what can be imported depends on no build of Python.
    for number, stream, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        opened = open(number, mode, encoding="utf-8", errors="surrogateescape", closefd=False)
        setattr(sys, stream, opened)
        setattr(sys, f"__{stream}__", opened)
    return module


def _text() -> dict[str, Any]:
    size = os.fstat(TEXT).st_size
    # At an offset: the processes of a program's tests share the file and its position.
    parts, read = [], 0
    while read < size:
        parts.append(os.pread(TEXT, size - read, read))
        read += len(parts[-1])
    os.close(TEXT)
    content: dict[str, Any] = json.loads(b"".join(parts))
    return content


def _code(text: str) -> types.CodeType:
    return compile(text, "program.py", "exec")

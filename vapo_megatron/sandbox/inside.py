"""What the confined processes do: run a program, serve calls of its functions, run a test.

Files 0 to 3 are standard input, output, errors, and the text to run. A program that serves, and a
test that calls it, exchange one line of JSON for each call and one for each reply:

    {"call": "f", "arguments": VALUE, "keywords": VALUE}     {"returned": VALUE} or {"raised": TYPE,
                                                             "message": TEXT}

with each VALUE as plain_values.py has it. Only a test has a file for its result.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
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


def run() -> None:
    """Run the text as a script, from standard input to standard output."""
    module = _module("__main__")
    try:
        exec(_code(), module.__dict__)
    finally:
        # As the interpreter ends a script, also one that raises.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()


def serve() -> None:
    """Run the text as a module, then answer calls of its functions until there are no more."""
    module = _module("program")
    exec(_code(), module.__dict__)
    with (
        open(INCOMING, encoding="utf-8") as calls,
        open(OUTGOING, "w", encoding="utf-8") as replies,
    ):
        for line in calls:
            call = json.loads(line)
            try:
                function = _find(call["call"], module.__dict__)
                arguments, keywords = decode(call["arguments"]), decode(call["keywords"])
                reply = json.dumps({"returned": encode(function(*arguments, **keywords))})
            except Exception as error:
                traceback.print_exc()
                reply = json.dumps({"raised": type(error).__name__, "message": str(error)})
            print(reply, file=replies, flush=True)


def test() -> None:
    """Run the text; names that it neither defines nor imports are functions of the program."""
    # Opened here, in a process in which no text of a response ever runs.
    with open(INCOMING, encoding="utf-8") as replies, open(OUTGOING, "wb", buffering=0) as calls:

        def candidate(expression: str) -> Callable[..., Any]:
            if expression.startswith("__"):  # What an import asks its module for.
                raise AttributeError(expression)
            return lambda *arguments, **keywords: _call(
                expression, arguments, keywords, calls, replies
            )

        source = _text()
        tree = ast.parse(source, "test.py")
        solution = types.ModuleType(PROGRAMS_MODULE)
        solution.__getattr__ = candidate  # type: ignore[method-assign]
        sys.modules[PROGRAMS_MODULE] = solution
        module = _module("test")
        module.__dict__.update({name: candidate(name) for name in _unbound(tree)})
        module.__dict__[CANDIDATE] = candidate
        exec(compile(source, "test.py", "exec"), module.__dict__)
    os.write(RESULT, PASSED)


def _call(expression: str, arguments: Any, keywords: Any, calls: RawIOBase, replies: TextIO) -> Any:
    request = {"call": expression, "arguments": encode(arguments), "keywords": encode(keywords)}
    line = ""
    with contextlib.suppress(BrokenPipeError):
        calls.write(json.dumps(request).encode() + b"\n")
        line = replies.readline()
    if not line:
        raise EOFError("the program has ended before its test")
    reply = json.loads(line)
    if "returned" in reply:
        return decode(reply["returned"])
    kind = getattr(builtins, str(reply["raised"]), None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = RuntimeError
    raise kind(reply["message"])


def _find(expression: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Return a function by an expression; a bare name may be a method of a class Solution."""
    if expression not in names and expression.isidentifier() and "Solution" in names:
        return getattr(names["Solution"](), expression)
    return eval(expression, names)


def _unbound(tree: ast.AST) -> set[str]:
    """Return the names that a text reads and nowhere binds."""
    read: set[str] = set()
    bound = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read - bound


def _module(name: str) -> types.ModuleType:
    """Return an empty module for the text, with the interpreter around it as for a script."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.path[:], sys.argv[:] = [], [f"{name}.py"]
    for number, stream, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        opened = open(number, mode, encoding="utf-8", errors="surrogateescape", closefd=False)
        setattr(sys, stream, opened)
        setattr(sys, f"__{stream}__", opened)
    return module


def _text() -> str:
    size = os.fstat(TEXT).st_size
    # At an offset: the processes of a program's tests share the file and its position.
    parts, read = [], 0
    while read < size:
        parts.append(os.pread(TEXT, size - read, read))
        read += len(parts[-1])
    os.close(TEXT)
    return b"".join(parts).decode("utf-8", "replace")


def _code() -> types.CodeType:
    return compile(_text(), "program.py", "exec")

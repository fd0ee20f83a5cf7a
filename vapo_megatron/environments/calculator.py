"""The tool `calculator`: arithmetic of a whitelist, read with Python's grammar, never evaluated."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 1000
MAX_BITS = 1 << 13
"""Of a whole number, about 2,400 digits."""

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitXor: operator.pow,
}
"""A caret is a power, as on calculators."""
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
    **{
        name: getattr(math, name)
        for name in (
            "sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan",
            "floor", "ceil", "factorial", "comb", "gcd", "lcm", "degrees", "radians",
        )
    },
}  # fmt: skip
_WRITTEN_OTHERWISE = str.maketrans("\u00d7\u00b7\u00f7\u2212\u2013", "**/--")
"""Signs of print: times, middle dot, divided by, minus, en dash."""


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: The expression, for example "(3 + 4) * 2 ** 5 / sqrt(2)". Operators are + - * /
            // % ** and ^ (power). Functions are abs, round, min, max, sqrt, exp, log, log2, log10,
            sin, cos, tan, asin, acos, atan, floor, ceil, factorial, comb, gcd, lcm, degrees and
            radians; constants are pi and e.

    Returns:
        The result; a whole number is exact.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has more than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip().translate(_WRITTEN_OTHERWISE), mode="eval")
        value = _value(tree.body)
    except SyntaxError as error:
        raise ValueError(f"this is no arithmetic expression: {error.msg}") from None
    except (RecursionError, MemoryError):  # The latter is how the grammar's stack overflows.
        raise ValueError("the expression is nested too deeply") from None
    return str(value) if isinstance(value, int) else f"{value:.15g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _checked(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _combined(_BINARY[type(op)], _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _applied(name, [_value(arg) for arg in args])
    raise ValueError(f"{ast.unparse(node)[:80]!r} is not allowed")


def _combined(operation: Callable[[Any, Any], Any], left: Number, right: Number) -> Number:
    if operation is operator.pow and isinstance(left, int) and isinstance(right, int):
        # Before it is computed: the exponent of a large result may itself be small.
        if right > 0 and left.bit_length() * right > 2 * MAX_BITS and abs(left) > 1:
            raise ValueError("the result is too large")
    return _checked(operation(left, right))


def _applied(name: str, arguments: list[Number]) -> Number:
    if name in ("factorial", "comb") and any(abs(value) > MAX_BITS for value in arguments):
        raise ValueError(f"an argument of {name} is too large")
    if name == "round" and any(abs(digits) > MAX_BITS for digits in arguments[1:]):
        raise ValueError("round has too many digits")
    return _checked(_FUNCTIONS[name](*arguments))


def _checked(value: Any) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ValueError("a number is too large")
        return value
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError("the result is not a finite real number")
    return value

r"""Regions of the real line, however they are written: intervals, inequalities, unions, sets."""

from __future__ import annotations

from typing import Any

from vapo_megatron.reward.mathematics.expression import Expression, Unparsable
from vapo_megatron.reward.mathematics.identity import as_expression
from vapo_megatron.reward.mathematics.parser import Either, Items, Relation, Value, side


def is_set(value: Value) -> bool:
    """Return whether an expression is a set, such as the real numbers."""
    from sympy import Set

    return isinstance(value, Expression) and isinstance(value.value, Set)


def same_sets(gold: Value, answer: Value) -> bool:
    """Return whether two regions are the same set of real numbers."""
    variables = {symbol for one in (gold, answer) if (symbol := _variable(one)) is not None}
    if len(variables) > 1:
        return False
    found = [_set(one) for one in (gold, answer)]
    if any(one is None for one in found):
        return False
    if found[0] == found[1]:
        return True
    difference = found[0].symmetric_difference(found[1])
    return bool(difference.is_empty)


def _variable(value: Value) -> str | None:
    parts = (
        value.parts
        if isinstance(value, Either)
        else value.values
        if isinstance(value, Items)
        else ()
    )
    if parts and all(isinstance(part, Relation) for part in parts):
        names = set(map(_variable, parts))
        return names.pop() if len(names) == 1 else None
    if not isinstance(value, Relation):
        return None
    symbols = set()
    for one in value.sides if value.operators != (r"\in",) else value.sides[:1]:
        try:
            symbols |= {str(symbol) for symbol in as_expression(side(one)).value.free_symbols}
        except (Unparsable, TypeError, AttributeError):
            return None
    return min(symbols) if len(symbols) == 1 else None


def _set(value: Value) -> Any:
    """Return a region of the real line as sympy's set, or None."""
    from sympy import FiniteSet, Intersection, Interval, Reals, Set, Union

    if isinstance(value, Expression):
        return value.value if isinstance(value.value, Set) else None
    if isinstance(value, Either):
        parts = [_set(part) for part in value.parts]
        return None if any(part is None for part in parts) else Union(*parts)
    # A list of inequalities is a conjunction; else a set {..} or an interval (a, b].
    if isinstance(value, Items):
        if value.values and all(isinstance(v, Relation) for v in value.values):
            if (
                "=" in {one for v in value.values for one in v.operators}
                or _variable(value) is None
            ):
                return None
            parts = [_set(one) for one in value.values]
            return None if any(part is None for part in parts) else Intersection(*parts)
        try:
            ends = [as_expression(one).value.doit() for one in value.values]
        except (Unparsable, TypeError, AttributeError):
            return None
        if value.left == "{":
            return FiniteSet(*ends)
        if (
            value.left in ("(", "[")
            and len(ends) == 2
            and all(end.is_extended_real for end in ends)
        ):
            return Interval(*ends, value.left == "(", value.right == ")")
        return None
    if not isinstance(value, Relation):
        return None
    if value.operators == (r"\in",):
        return _set(value.sides[1])
    if _variable(value) is None:
        return None
    # A chain a < x <= b is the intersection of its links.
    found = Reals
    for operator, left, right in zip(value.operators, value.sides, value.sides[1:]):
        one = _region(operator, *(as_expression(side(s)).value.doit() for s in (left, right)))
        if one is None:
            return None
        found = found.intersect(one)
    return found


def _region(operator: str, left: Any, right: Any) -> Any:
    """Return where an inequality in one letter holds."""
    from sympy import FiniteSet, Interval, Reals, Symbol, oo, solve_univariate_inequality

    if isinstance(right, Symbol) and not left.free_symbols:
        operator = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}.get(operator, operator)
        left, right = right, left
    if isinstance(left, Symbol) and right.is_extended_real and not right.free_symbols:
        regions = {
            "<": lambda: Interval.open(-oo, right),
            ">": lambda: Interval.open(right, oo),
            r"\le": lambda: Interval(-oo, right),
            r"\ge": lambda: Interval(right, oo),
            r"\ne": lambda: Reals - FiniteSet(right),
            "=": lambda: FiniteSet(right),
        }
        return regions[operator]() if operator in regions else None
    kinds = {"<": left < right, ">": left > right, r"\le": left <= right, r"\ge": left >= right}
    relation = kinds.get(operator)
    symbols = (left - right).free_symbols
    if relation is None or len(symbols) != 1 or relation in (True, False):
        return None
    return solve_univariate_inequality(relation, next(iter(symbols)), relational=False)

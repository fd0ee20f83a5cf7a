r"""Whether two values of math_parser are equal: exactly, or as decimals to six places.

Not symmetric: the first is the ground truth, which says what is wanted. Nothing is equal because its
difference is small: numbers are compared in proportion to their size.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from vapo_megatron.reward.math_numbers import BasedNumber, Number, units_agree
from vapo_megatron.reward.math_parser import (
    Builder,
    Either,
    Expression,
    Items,
    Measured,
    Relation,
    Residue,
    Unparsable,
    Value,
    Word,
    expression,
    side,
)

DIGITS = 50
"""Of the numbers that identities are tried with."""
_FLIPPED = {"<": ">", r"\le": r"\ge"}


def equal(gold: Value, answer: Value) -> bool:
    """Return whether an answer is what the ground truth says."""
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _relations(gold, answer)
    if isinstance(gold, Residue) or isinstance(answer, Residue):
        return _residues(gold, answer)
    if isinstance(gold, Measured) or isinstance(answer, Measured):
        return _measured(gold, answer)
    if isinstance(gold, Number) and isinstance(answer, Number):
        return _numbers(gold, answer)
    if isinstance(gold, Builder) and isinstance(answer, Builder):
        return equal(gold.element, answer.element) and equal(gold.condition, answer.condition)
    exact = (BasedNumber, Word, Builder)
    if isinstance(gold, exact) or isinstance(answer, exact):
        return type(gold) is type(answer) and gold == answer
    if isinstance(gold, Items | Either) or isinstance(answer, Items | Either):
        return _collections(gold, answer)
    return _expressions(_sympy(gold), _sympy(answer))


# Numbers ----------------------------------------------------------------------------------------


def _numbers(gold: Number, answer: Number) -> bool:
    if gold.is_percent == answer.is_percent:
        return _close(gold.value, answer.value, gold.has_point, answer.has_point)
    # 9 % may be given as 9 and as 0.09.
    whole = all(n.value.denominator == 1 and not n.has_point for n in (gold, answer))
    if whole and gold.value == answer.value:
        return True
    first, second = (n.value / 100 if n.is_percent else n.value for n in (gold, answer))
    return _close(first, second, gold.has_point, answer.has_point)


def _close(gold: Any, answer: Any, *has_points: bool) -> bool:
    """Return whether two numbers are equal; where one is a decimal, to six places.

    Decimals that end are taken at their word beyond a millionth of them.
    """
    if gold == answer:
        return True
    if not any(has_points):
        return False
    difference, size = abs(gold - answer), max(abs(gold), abs(answer))
    if difference * 10**4 > size:
        return False
    places = [_places(n.denominator) if isinstance(n, Fraction) else None for n in (gold, answer)]
    if None not in places:
        shorter = min(places)
        return shorter >= 6 and 2 * difference * 10**shorter <= 1
    if size < 1 and difference * 10**6 <= size:
        return True
    return bool(_six_places(gold) == _six_places(answer))


def _places(denominator: int) -> int | None:
    """Return how many decimals a fraction has; None: endlessly many."""
    count = 0
    while denominator % 10 == 0:
        denominator //= 10
        count += 1
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
            count += 1
    return count if denominator == 1 else None


def _six_places(value: Any) -> Any:
    return round(value * 10**6) if isinstance(value, Fraction) else round(float(value.real) * 1e6)


# Units, remainders -----------------------------------------------------------------------------


def _measured(gold: Value, answer: Value) -> bool:
    # The letter at the end may be a variable: 2 s.
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Measured) and one.whole and not isinstance(other, Measured):
            try:
                whole = expression(one.whole)
            except Unparsable:
                return False
            as_letters = (whole, other) if one is gold else (other, whole)
            if equal(*as_letters):
                return True
            if one is gold or not isinstance(other, Number):
                return False
    if any(isinstance(one, Number) and one.is_percent for one in (gold, answer)):
        return False
    units = [one.unit if isinstance(one, Measured) else None for one in (gold, answer)]
    values = [one.value if isinstance(one, Measured) else one for one in (gold, answer)]
    if isinstance(gold, Measured) and isinstance(answer, Expression) and _has_symbols(answer):
        if not (isinstance(gold.value, Expression) and _has_symbols(gold.value)):
            return False
    return units_agree(*units) and equal(*values)


def _has_symbols(value: Expression) -> bool:
    return bool(value.value.free_symbols)


def _residues(gold: Value, answer: Value) -> bool:
    moduli = [one.modulus if isinstance(one, Residue) else None for one in (gold, answer)]
    values = [one.value if isinstance(one, Residue) else one for one in (gold, answer)]
    if None not in moduli and moduli[0] != moduli[1]:
        return False
    if None not in moduli and all(isinstance(value, Number) for value in values):
        return (values[0].value - values[1].value) % moduli[0].value == 0
    return equal(*values)


# Lists, tuples, sets ---------------------------------------------------------------------------


def _collections(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Items) and isinstance(answer, Items):
        names = _assigned(gold), _assigned(answer)
        if names[0] is not None and names[1] is not None:
            first, second = names
            return first.keys() == second.keys() and all(equal(first[k], second[k]) for k in first)
        if gold.left in ("", "{"):
            if names[0] is not None and not any(isinstance(v, Relation) for v in answer.values):
                return _in_order([names[0][k] for k in sorted(names[0])], answer.values)
            if gold.left == "{" and answer.left == "[" or _is_half_open(answer):
                return False
            return _in_any_order(gold.values, answer.values)
        if names[1] is not None:
            return _in_order(gold.values, [names[1][k] for k in sorted(names[1])])
        if len(gold.values) == 2:
            brackets = (answer.left, answer.right)
            if answer.left in ("", "{") and (gold.left, gold.right) != ("(", ")"):
                return False
            if answer.left not in ("", "{") and brackets != (gold.left, gold.right):
                return False
        return _in_order(gold.values, answer.values)
    if isinstance(gold, Either) and isinstance(answer, Either):
        if _in_any_order(gold.parts, answer.parts):
            return True
    for one, other in ((gold, answer), (answer, gold)):
        # A list or set of one.
        if isinstance(one, Items) and one.left in ("", "{") and isinstance(other, Number | Expression):
            if one.values and not _is_set(other):
                found = _distinct(one.values)
                return len(found) == 1 and equal(*((found[0], other) if one is gold else (other, found[0])))
    return _same_sets(gold, answer)


def _is_half_open(value: Items) -> bool:
    return len(value.values) == 2 and (value.left, value.right) in (("[", ")"), ("(", "]"), ("[", "]"))


def _is_set(value: Value) -> bool:
    from sympy import Set

    return isinstance(value, Expression) and isinstance(value.value, Set)


def _assigned(items: Items) -> dict[str, Any] | None:
    """Return name -> value of a system's solution; None: it is none."""
    if items.left in ("[",) or len(items.values) < 2:
        return None
    found = {}
    for value in items.values:
        if not (isinstance(value, Relation) and value.name and set(value.operators) == {"="}):
            return None
        found[value.name] = value.sides[-1]
    return found if len(found) == len(items.values) else None


def _in_order(gold: Sequence[Value], answer: Sequence[Value]) -> bool:
    return len(gold) == len(answer) and all(map(equal, gold, answer))


def _in_any_order(gold: Sequence[Value], answer: Sequence[Value]) -> bool:
    if len(gold) != len(answer):
        gold, answer = _distinct(gold), _distinct(answer)
        if len(gold) != len(answer):
            return False
    left = list(answer)
    for wanted in gold:
        for i, given in enumerate(left):
            if equal(wanted, given):
                del left[i]
                break
        else:
            return False
    return True


def _distinct(values: Sequence[Value]) -> list[Value]:
    found: list[Value] = []
    for value in values:
        if not any(equal(one, value) for one in found):
            found.append(value)
    return found


# Relations -------------------------------------------------------------------------------------


def _relations(gold: Value, answer: Value) -> bool:
    if not isinstance(gold, Relation):
        assert isinstance(answer, Relation)
        if set(answer.operators) <= {"="} and not (isinstance(gold, Items | Either) and gold_has_names(gold)):
            constants = [one for one in answer.sides[:-1] if _is_constant(one)]
            last = answer.sides[-1]
            return equal(gold, last) and all(equal(last, one) for one in constants)
        if answer.operators == (r"\in",):
            if isinstance(gold, Number | Expression) and not _is_set(gold):
                return False
            return equal(gold, answer.sides[1])
        return _same_sets(gold, answer)
    if not isinstance(answer, Relation):
        if gold.name and set(gold.operators) <= {"="}:
            return equal(gold.sides[-1], answer)
        if gold.name and gold.operators == (r"\in",):
            return equal(gold.sides[1], answer) or _same_sets(gold, answer)
        if isinstance(answer, Items) and answer.left == "" and set(gold.operators) == {"="}:
            return _solutions(gold, answer)
        return _same_sets(gold, answer)
    if set(gold.operators) == set(answer.operators) == {"="}:
        return _equations(gold, answer)
    if r"\in" in gold.operators + answer.operators:
        if gold.operators == answer.operators and _same_name(gold, answer):
            return equal(gold.sides[1], answer.sides[1])
        return _same_sets(gold, answer)
    if gold.operators == answer.operators and _in_order(_sides(gold), _sides(answer)):
        return True
    if len(gold.operators) == len(answer.operators) == 1:
        first, second = _oriented(gold), _oriented(answer)
        if first is None or second is None or first[0] != second[0]:
            return _same_sets(gold, answer)
        ratio = _constant_ratio(first[1], second[1])
        if ratio is not None and (ratio > 0 or first[0] == r"\ne"):
            return True
    return _same_sets(gold, answer)


def _is_constant(value: Any) -> bool:
    from sympy import Integral, Limit, Product, Sum

    if isinstance(value, Expression):
        return value.value.is_number is True and not value.value.has(Integral, Limit, Product, Sum)
    return isinstance(value, Number)


def gold_has_names(gold: Items | Either) -> bool:
    """Return whether a list's members are relations."""
    return isinstance(gold, Items) and any(isinstance(v, Relation) for v in gold.values)


def _sides(relation: Relation) -> list[Value]:
    return [side(one) for one in relation.sides]


def _same_name(gold: Relation, answer: Relation) -> bool:
    if gold.name is None or answer.name is None:
        return False
    if len(gold.name) == len(answer.name) == 1:
        return gold.name.casefold() == answer.name.casefold()
    return gold.name == answer.name


def _equations(gold: Relation, answer: Relation) -> bool:
    if _same_name(gold, answer):
        return equal(gold.sides[-1], answer.sides[-1])
    if len(gold.sides) == len(answer.sides) and _in_order(_sides(gold), _sides(answer)):
        return True
    if len(gold.sides) != 2 or len(answer.sides) != 2:
        return gold.name is None and answer.name is None and equal(gold.sides[-1], answer.sides[-1]) and equal(
            gold.sides[0], answer.sides[0]
        )
    try:
        first, second = (_sympy(s[0]).value - _sympy(s[1]).value for s in map(_sides, (gold, answer)))
    except (Unparsable, TypeError, AttributeError):
        return False
    if _constant_ratio(first, second) is not None:
        return True
    symbols = first.free_symbols
    if len(symbols) != 1 or symbols != second.free_symbols:
        return False
    return _roots(first) is not None and _roots(first) == _roots(second)


def _roots(difference: Any) -> Any:
    """Return the solutions of difference = 0 in its one symbol, or None."""
    from sympy import FiniteSet, solveset

    found = solveset(difference, next(iter(difference.free_symbols)))
    return found if isinstance(found, FiniteSet) and found else None


def _solutions(gold: Relation, answer: Items) -> bool:
    """Return whether the list `x = 1, x = 2` solves an equation."""
    if not all(isinstance(v, Relation) and v.name and len(v.name) == 1 for v in answer.values):
        return False
    try:
        left, right = (_sympy(one).value for one in (_sides(gold)[0], _sides(gold)[-1]))
    except (Unparsable, TypeError):
        return False
    symbols = {str(symbol) for symbol in (left - right).free_symbols}
    if symbols != {v.name for v in answer.values}:
        return False
    roots = _roots((left - right).doit())
    return roots is not None and _in_any_order(
        [Expression(root) for root in roots], [v.sides[-1] for v in answer.values]
    )


def _oriented(relation: Relation) -> tuple[str, Any] | None:
    """Return (operator, difference) of an inequality as `difference > 0`."""
    operator = relation.operators[0]
    try:
        left, right = (_sympy(one).value for one in _sides(relation))
        difference = left - right
    except (Unparsable, TypeError, AttributeError):
        return None
    flipped = _FLIPPED.get(operator)
    return (flipped, -difference) if flipped else (operator, difference)


def _constant_ratio(first: Any, second: Any) -> Any:
    """Return first / second if it is a number other than 0 everywhere, else None."""
    import mpmath

    if not first.free_symbols or first.free_symbols != second.free_symbols:
        return None
    ratio = None
    for point in _points(first.free_symbols)[:4]:
        above, below = _at(first, point), _at(second, point)
        if above is None or below is None:
            continue
        if not above or not below:
            return None
        with mpmath.workdps(DIGITS):
            here = above / below
        if ratio is not None and not _within(ratio, here):
            return None
        ratio = here
    if ratio is None or ratio.imag:
        return None
    return ratio.real


def _same_sets(gold: Value, answer: Value) -> bool:
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
    parts = value.parts if isinstance(value, Either) else value.values if isinstance(value, Items) else ()
    if parts and all(isinstance(part, Relation) for part in parts):
        names = set(map(_variable, parts))
        return names.pop() if len(names) == 1 else None
    if not isinstance(value, Relation):
        return None
    symbols = set()
    for one in value.sides if value.operators != (r"\in",) else value.sides[:1]:
        try:
            symbols |= {str(symbol) for symbol in _sympy(side(one)).value.free_symbols}
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
    if isinstance(value, Items):
        if value.values and all(isinstance(v, Relation) for v in value.values):
            if "=" in {one for v in value.values for one in v.operators} or _variable(value) is None:
                return None
            parts = [_set(one) for one in value.values]
            return None if any(part is None for part in parts) else Intersection(*parts)
        try:
            ends = [_sympy(one).value.doit() for one in value.values]
        except (Unparsable, TypeError, AttributeError):
            return None
        if value.left == "{":
            return FiniteSet(*ends)
        if value.left in ("(", "[") and len(ends) == 2 and all(end.is_extended_real for end in ends):
            return Interval(*ends, value.left == "(", value.right == ")")
        return None
    if not isinstance(value, Relation):
        return None
    if value.operators == (r"\in",):
        return _set(value.sides[1])
    if _variable(value) is None:
        return None
    found = Reals
    for operator, left, right in zip(value.operators, value.sides, value.sides[1:]):
        one = _region(operator, *(_sympy(side(s)).value.doit() for s in (left, right)))
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


# Expressions -----------------------------------------------------------------------------------


def _sympy(value: Value) -> Expression:
    from sympy import Rational

    if isinstance(value, Expression):
        return value
    if isinstance(value, Number):
        exact = value.value / 100 if value.is_percent else value.value
        return Expression(Rational(exact.numerator, exact.denominator), value.has_point)
    raise Unparsable("no expression")


def _expressions(gold: Expression, answer: Expression) -> bool:
    from sympy import MatrixBase, Set, Symbol, nan, zoo

    first, second = gold.value, answer.value
    if isinstance(first, MatrixBase) or isinstance(second, MatrixBase):
        return _matrices(gold, answer)
    names = _letter(first), _letter(second)
    if all(names):
        return names[0].casefold() == names[1].casefold()
    if isinstance(first, Symbol) and isinstance(second, Symbol):
        return str(first) == str(second)
    if isinstance(first, Set) or isinstance(second, Set):
        return isinstance(first, Set) and isinstance(second, Set) and _same_sets(gold, answer)
    first, second = first.doit(), second.doit()
    if first.has(nan, zoo) or second.has(nan, zoo):
        return False
    if first == second:
        return True
    if not first.free_symbols and not second.free_symbols:
        if first.is_Rational and second.is_Rational:
            numbers = [Fraction(int(one.p), int(one.q)) for one in (first, second)]
            return _close(*numbers, gold.has_point, answer.has_point)
        if first.is_number and second.is_number:
            values = [_at(one, {}) for one in (first, second)]
            if None in values:
                return False
            return _within(*values) or _close(*values, gold.has_point, answer.has_point)
    return _identical(first, second)


def _letter(value: Any) -> str:
    """Return the letter that is all of an expression, or "" ."""
    name = {"E": "e", "I": "i"}.get(str(value)) if value.is_number else str(value)
    return name if name is not None and len(name) == 1 and name.isalpha() else ""


def _matrices(gold: Expression, answer: Expression) -> bool:
    from sympy import MatrixBase, MatrixExpr

    found = [
        one.value.doit() if isinstance(one.value, MatrixBase | MatrixExpr) else None
        for one in (gold, answer)
    ]
    if not all(isinstance(one, MatrixBase) for one in found) or found[0].shape != found[1].shape:
        return False
    cells = zip(found[0].flat(), found[1].flat())
    return all(
        _expressions(Expression(a, gold.has_point), Expression(b, answer.has_point))
        for a, b in cells
    )


def _identical(first: Any, second: Any) -> bool:
    """Return whether two expressions are equal where the first is real, else everywhere."""
    from sympy import Dummy, simplify
    from sympy.core.function import AppliedUndef

    if symbol := _constant_of_integration(first, second):
        second = second.xreplace(symbol)
    undefined = first.atoms(AppliedUndef) | second.atoms(AppliedUndef)
    if undefined:
        swaps = {one: Dummy(real=True) for one in sorted(undefined, key=str)}
        first, second = first.xreplace(swaps), second.xreplace(swaps)
    symbols = first.free_symbols | second.free_symbols
    if first.is_polynomial(*symbols) and second.is_polynomial(*symbols):
        return bool((first - second).expand() == 0)
    real, other = [], []
    for point in _points(symbols):
        one = _at(first, point)
        if one is None:
            continue
        two = _at(second, point)
        same = two is not None and _within(one, two)
        if not one.imag and _is_real_inside(first, point):
            if not same:
                return False
            real.append(same)
        elif two is not None:
            other.append(same)
    if real or other:
        return all(real or other)
    return bool(simplify(first - second) == 0)


def _is_real_inside(value: Any, point: dict[Any, Any]) -> bool:
    """Return whether the roots and logarithms in an expression are real too."""
    from sympy import Pow, log

    parts = [p for p in value.atoms(Pow, log) if not (p.is_Pow and p.exp.is_Integer)]
    return all(here is not None and not here.imag for here in (_at(p, point) for p in parts))


def _constant_of_integration(first: Any, second: Any) -> dict[Any, Any] | None:
    """Return how to write the second's + c as the first's + C, if that is what the letters are."""
    found = []
    for one, other in ((first, second), (second, first)):
        mine = [s for s in one.free_symbols if str(s) in ("C", "c", "K", "k")]
        if len(mine) != 1 or mine[0] in other.free_symbols or (one - mine[0]).has(mine[0]):
            return None
        found.append(mine[0])
    same_letter = str(found[0]).lower() == str(found[1]).lower()
    return {found[1]: found[0]} if same_letter and str(found[0]) in "Cc" else None


def _points(symbols: Any) -> list[dict[Any, Any]]:
    """Return the points, the same in every run, where expressions are compared."""
    from sympy import Rational

    draw = random.Random(0)
    ordered = sorted(symbols, key=str)
    ranges = ((20, 90), (110, 400), (-90, -20), (-400, -110), (-300, 300), (900, 3000))
    points = []
    for low, high in ranges:
        points.append({s: Rational(draw.randint(low, high) * 7 + 3, 701) for s in ordered})
    return points


def _at(value: Any, point: dict[Any, Any]) -> Any:
    """Return an expression's value at a point with DIGITS digits, or None: it has none."""
    import mpmath

    here = value.xreplace(point) if point else value
    if not here.is_number:
        return None
    found = here.evalf(DIGITS, chop=False, maxn=400)
    parts = []
    with mpmath.workdps(DIGITS + 10):
        for part in found.as_real_imag():
            if not (part.is_Float or part.is_Rational):
                return None
            # A few bits are what is left of a difference that is 0.
            is_nothing = part.is_Float and part._prec < 20
            parts.append(mpmath.mpf(0) if is_nothing else _mpf(part))
        return mpmath.mpc(*parts)


def _mpf(part: Any) -> Any:
    import mpmath

    return mpmath.mpf(part._mpf_) if part.is_Float else mpmath.mpf(int(part.p)) / int(part.q)


def _within(first: Any, second: Any) -> bool:
    """Return whether two numbers of DIGITS digits are the same."""
    import mpmath

    with mpmath.workdps(DIGITS + 10):
        return bool(abs(first - second) <= mpmath.mpf(10) ** -30 * max(abs(first), abs(second)))

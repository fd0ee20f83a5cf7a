r"""Whether two expressions are equal: exactly, as decimals, or as identities.

Nothing is equal because its difference is small: numbers are compared in proportion to their size.
Identities are tried at points, with 50 digits.
"""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

from vapo_megatron.reward.mathematics.expression import Expression, Unparsable
from vapo_megatron.reward.mathematics.numbers import Number
from vapo_megatron.reward.mathematics.parser import Value

DIGITS = 50
"""Of the numbers that identities are tried with."""
ENDLESS = -1


def close(gold: Any, answer: Any, *has_points: bool) -> bool:
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
    places = [
        _places(n.denominator) if isinstance(n, Fraction) else ENDLESS for n in (gold, answer)
    ]
    if ENDLESS not in places:
        shorter = min(places)
        return shorter >= 6 and bool(2 * difference * 10**shorter <= 1)
    if size < 1 and difference * 10**6 <= size:
        return True
    return bool(_six_places(gold) == _six_places(answer))


def _places(denominator: int) -> int:
    """Return how many decimals a fraction has, or ENDLESS."""
    count = 0
    while denominator % 10 == 0:
        denominator //= 10
        count += 1
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
            count += 1
    return count if denominator == 1 else ENDLESS


def _six_places(value: Any) -> Any:
    return round(value * 10**6) if isinstance(value, Fraction) else round(float(value.real) * 1e6)


def as_expression(value: Value) -> Expression:
    """Return a number or an expression as one that sympy computes with, else raise Unparsable."""
    from sympy import Rational

    if isinstance(value, Expression):
        return value
    if isinstance(value, Number):
        exact = value.value / 100 if value.is_percent else value.value
        return Expression(Rational(exact.numerator, exact.denominator), value.has_point)
    raise Unparsable("no expression")


def expressions_equal(gold: Expression, answer: Expression) -> bool:
    """Return whether an expression or a matrix is the one of the ground truth."""
    from sympy import MatrixBase, Symbol, nan, zoo

    first, second = gold.value, answer.value
    if isinstance(first, MatrixBase) or isinstance(second, MatrixBase):
        return _matrices(gold, answer)
    names = _letter(first), _letter(second)
    if all(names):
        return names[0].casefold() == names[1].casefold()
    if isinstance(first, Symbol) and isinstance(second, Symbol):
        return str(first) == str(second)
    first, second = first.doit(), second.doit()
    if first.has(nan, zoo) or second.has(nan, zoo):
        return False
    if first == second:
        return True
    if not first.free_symbols and not second.free_symbols:
        if first.is_Rational and second.is_Rational:
            one, two = (Fraction(int(n.p), int(n.q)) for n in (first, second))
            return close(one, two, gold.has_point, answer.has_point)
        if first.is_number and second.is_number:
            one, two = _at(first, {}), _at(second, {})
            if one is None or two is None:
                return False
            return _within(one, two) or close(one, two, gold.has_point, answer.has_point)
    return _identical(first, second)


def _letter(value: Any) -> str:
    """Return the letter that is all of an expression, or "" ."""
    name = {"E": "e", "I": "i"}.get(str(value)) if value.is_number else str(value)
    return name if name is not None and len(name) == 1 and name.isalpha() else ""


def _matrices(gold: Expression, answer: Expression) -> bool:
    from sympy import MatrixBase, MatrixExpr

    if not all(isinstance(one.value, MatrixBase | MatrixExpr) for one in (gold, answer)):
        return False
    first, second = gold.value.doit(), answer.value.doit()
    if not (isinstance(first, MatrixBase) and isinstance(second, MatrixBase)):
        return False
    if first.shape != second.shape:
        return False
    cells = zip(first.flat(), second.flat())
    return all(
        expressions_equal(Expression(a, gold.has_point), Expression(b, answer.has_point))
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
    if max(map(_tower, (first, second))) > 2:
        return False
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


def _tower(value: Any) -> int:
    """Return how many powers with exponents that hold symbols stand upon one another."""
    if not value.free_symbols:
        return 0
    below = max(map(_tower, value.args), default=0)
    if value.is_Pow or value.func.__name__ == "exp":
        return max(below, 1 + _tower(value.as_base_exp()[1])) if value.exp.free_symbols else below
    return below


def _is_real_inside(value: Any, point: dict[Any, Any]) -> bool:
    """Return whether the roots and logarithms in an expression are real too."""
    from sympy import Pow, log

    parts = [p for p in value.atoms(Pow, log) if not (p.is_Pow and p.exp.is_Integer)]
    return all(here is not None and not here.imag for here in (_at(p, point) for p in parts))


def _constant_of_integration(first: Any, second: Any) -> dict[Any, Any] | None:
    """Return how to write the second's + c as the first's + C, if that is what the letters are."""
    found = []
    for one, other in ((first, second), (second, first)):
        mine = [s for s in one.free_symbols if str(s) in ("C", "c")]
        if len(mine) != 1 or mine[0] in other.free_symbols or (one - mine[0]).has(mine[0]):
            return None
        found.append(mine[0])
    return {found[1]: found[0]}


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


def constant_ratio(first: Any, second: Any) -> Any:
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

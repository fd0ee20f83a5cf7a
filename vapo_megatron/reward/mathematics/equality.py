r"""Whether two values of parser.py are equal.

Not symmetric: the first is the ground truth, which says what is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vapo_megatron.reward.mathematics.expression import Expression, Unparsable, expression
from vapo_megatron.reward.mathematics.identity import (
    as_expression,
    close,
    constant_ratio,
    expressions_equal,
)
from vapo_megatron.reward.mathematics.numbers import BasedNumber, Number, units_agree
from vapo_megatron.reward.mathematics.parser import (
    Builder,
    Either,
    Items,
    Measured,
    Relation,
    Residue,
    Value,
    Word,
    side,
)
from vapo_megatron.reward.mathematics.regions import is_set, same_sets

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
    if is_set(gold) or is_set(answer):
        return is_set(gold) and is_set(answer) and same_sets(gold, answer)
    return expressions_equal(as_expression(gold), as_expression(answer))


# Numbers ----------------------------------------------------------------------------------------


def _numbers(gold: Number, answer: Number) -> bool:
    if gold.is_percent == answer.is_percent:
        return close(gold.value, answer.value, gold.has_point, answer.has_point)
    # 9 % may be given as 9 and as 0.09.
    whole = all(n.value.denominator == 1 and not n.has_point for n in (gold, answer))
    if whole and gold.value == answer.value:
        return True
    first, second = (n.value / 100 if n.is_percent else n.value for n in (gold, answer))
    return close(first, second, gold.has_point, answer.has_point)


# Units, remainders -----------------------------------------------------------------------------


def _measured(gold: Value, answer: Value) -> bool:
    """Compare where one of the two has a unit."""
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
    if isinstance(gold, Residue) and isinstance(answer, Residue):
        if gold.modulus != answer.modulus:
            return False
        if isinstance(gold.value, Number) and isinstance(answer.value, Number):
            difference = gold.value.value - answer.value.value
            return bool(difference % gold.modulus.value == 0)
    values = [one.value if isinstance(one, Residue) else one for one in (gold, answer)]
    return equal(values[0], values[1])


# Lists, tuples, sets ---------------------------------------------------------------------------


def _collections(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Items) and isinstance(answer, Items):
        return _item_lists(gold, answer)
    if isinstance(gold, Either) and isinstance(answer, Either):
        if _in_any_order(gold.parts, answer.parts):
            return True
    # A list or set of one.
    if isinstance(gold, Items) and _is_single(answer):
        found = _distinct(gold.values) if gold.left in ("", "{") else []
        return len(found) == 1 and equal(found[0], answer)
    if isinstance(answer, Items) and _is_single(gold):
        found = _distinct(answer.values) if answer.left in ("", "{") else []
        return len(found) == 1 and equal(gold, found[0])
    return same_sets(gold, answer)


def _is_single(value: Value) -> bool:
    return isinstance(value, Number | Expression) and not is_set(value)


def _item_lists(gold: Items, answer: Items) -> bool:
    wanted, given = _assigned(gold), _assigned(answer)
    if wanted is not None and given is not None:
        return wanted.keys() == given.keys() and all(equal(wanted[k], given[k]) for k in wanted)
    if gold.left in ("", "{"):
        if wanted is not None and not any(isinstance(v, Relation) for v in answer.values):
            return _in_order([wanted[k] for k in sorted(wanted)], answer.values)
        return not _is_half_open(answer) and _in_any_order(gold.values, answer.values)
    if given is not None:
        return _in_order(gold.values, [given[k] for k in sorted(given)])
    if len(gold.values) == 2:
        brackets = (gold.left, gold.right)
        if answer.left in ("", "{") and brackets != ("(", ")"):
            return False
        if answer.left not in ("", "{") and (answer.left, answer.right) != brackets:
            return False
    return _in_order(gold.values, answer.values)


def _is_half_open(value: Items) -> bool:
    return len(value.values) == 2 and (value.left, value.right) in (
        ("[", ")"),
        ("(", "]"),
        ("[", "]"),
    )


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
    """Compare where one of the two is a relation: `x = 5` is worth 5, an inequality its region."""
    if not isinstance(gold, Relation):
        assert isinstance(answer, Relation)
        has_relations = isinstance(gold, Items) and any(
            isinstance(one, Relation) for one in gold.values
        )
        if set(answer.operators) == {"="} and not has_relations:
            constants = [one for one in answer.sides[:-1] if _is_constant(one)]
            last = answer.sides[-1]
            return equal(gold, last) and all(equal(last, one) for one in constants)
        if answer.operators == (r"\in",):
            if isinstance(gold, Number | Expression) and not is_set(gold):
                return False
            return equal(gold, answer.sides[1])
        return same_sets(gold, answer)
    if not isinstance(answer, Relation):
        if gold.name and set(gold.operators) == {"="}:
            return equal(gold.sides[-1], answer)
        if gold.name and gold.operators == (r"\in",):
            return equal(gold.sides[1], answer) or same_sets(gold, answer)
        if isinstance(answer, Items) and answer.left == "" and set(gold.operators) == {"="}:
            return _solutions(gold, answer)
        return same_sets(gold, answer)
    if set(gold.operators) == set(answer.operators) == {"="}:
        return _equations(gold, answer)
    if r"\in" in gold.operators + answer.operators:
        if gold.operators == answer.operators and _same_name(gold, answer):
            return equal(gold.sides[1], answer.sides[1])
        return same_sets(gold, answer)
    if gold.operators == answer.operators and _in_order(_sides(gold), _sides(answer)):
        return True
    if len(gold.operators) == len(answer.operators) == 1:
        first, second = _oriented(gold), _oriented(answer)
        if first is None or second is None or first[0] != second[0]:
            return same_sets(gold, answer)
        ratio = constant_ratio(first[1], second[1])
        if ratio is not None and (ratio > 0 or first[0] == r"\ne"):
            return True
    return same_sets(gold, answer)


def _is_constant(value: Any) -> bool:
    from sympy import Integral, Limit, Product, Sum

    if isinstance(value, Expression):
        return value.value.is_number is True and not value.value.has(Integral, Limit, Product, Sum)
    return isinstance(value, Number)


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
        return (
            gold.name is None
            and answer.name is None
            and equal(gold.sides[-1], answer.sides[-1])
            and equal(gold.sides[0], answer.sides[0])
        )
    try:
        first, second = map(_difference, (gold, answer))
    except (Unparsable, TypeError, AttributeError):
        return False
    if constant_ratio(first, second) is not None:
        return True
    symbols = first.free_symbols
    if len(symbols) != 1 or symbols != second.free_symbols:
        return False
    return _roots(first) is not None and _roots(first) == _roots(second)


def _difference(relation: Relation) -> Any:
    """Return the first side minus the last."""
    sides = [as_expression(one).value for one in _sides(relation)]
    return sides[0] - sides[-1]


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
        difference = _difference(gold)
    except (Unparsable, TypeError):
        return False
    symbols = {str(symbol) for symbol in difference.free_symbols}
    if symbols != {v.name for v in answer.values}:
        return False
    roots = _roots(difference.doit())
    return roots is not None and _in_any_order(
        [Expression(root) for root in roots], [v.sides[-1] for v in answer.values]
    )


def _oriented(relation: Relation) -> tuple[str, Any] | None:
    """Return (operator, difference) of an inequality as `difference > 0`."""
    operator = relation.operators[0]
    try:
        difference = _difference(relation)
    except (Unparsable, TypeError, AttributeError):
        return None
    flipped = _FLIPPED.get(operator)
    return (flipped, -difference) if flipped else (operator, difference)

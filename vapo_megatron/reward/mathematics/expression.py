r"""What math-verify's parser makes of an expression, with its letters, roots and decimals kept."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

_I = re.compile(r"\\[A-Za-z]+|I")


class Unparsable(ValueError):
    """A text is no formula."""


class Expression(NamedTuple):
    """What sympy computes with."""

    value: Any
    has_point: bool = False


def expression(text: str) -> Expression:
    """Return what math-verify's parser makes of an expression, with its letters as they are."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify.parser import NormalizationConfig, latex2sympy, normalize_latex
    from sympy import Basic, Float, I, MatrixBase, Rational, Symbol

    if re.search(r"\\\\(?!.*\\end\{)|\\text\{[^{}]*\}\s*\S", text) and "matrix" not in text:
        raise Unparsable("lines, or words in a formula")
    bare = text[6:-1].strip() if re.fullmatch(r"\\text\{\s*[A-Za-z]\s*\}", text) else text
    if len(bare) == 1 and bare.isalpha() and (bare not in "ei" or bare != text):
        return Expression(Symbol(bare, real=True))
    if "I" in text:
        text = _I.sub(lambda m: r"\text{I}" if m[0] == "I" else m[0], text)
    rest = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    try:
        found = latex2sympy(
            normalize_latex(text, rest),
            is_real=True,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except MemoryError:
        raise
    except Exception as error:
        raise Unparsable(str(error)) from None
    if not isinstance(found, Basic | MatrixBase):
        raise Unparsable("no expression")
    floats = found.atoms(Float)
    swaps = {one: Rational(str(one)) for one in floats}
    if any(str(symbol) == "i" for symbol in found.free_symbols):
        swaps |= {symbol: I for symbol in found.free_symbols if str(symbol) == "i"}
    if "\\sqrt[" in text:  # The odd root of a negative number is the real one.
        found = found.replace(
            lambda e: e.is_Pow and e.exp.is_Rational and e.exp.p == 1 and e.exp.q % 2 == 1
            and e.exp.q > 1 and e.base.is_number and e.base.is_negative,
            lambda e: -((-e.base) ** e.exp),
        )  # fmt: skip
    return Expression(found.xreplace(swaps) if swaps else found, bool(floats))

r"""Characters beyond ASCII as LaTeX has them."""

from __future__ import annotations

import re
import unicodedata

_TABLE = r"""
- 2212 2013 2014 2010 2011 2012
\times d7
/ f7 2044 2215
\cdot b7 22c5 2219
* 2217
\pm b1
\mp 2213
\le 2264 2a7d
\ge 2265 2a7e
\ne 2260
\approx 2248
\equiv 2261
\infty 221e
\in 2208
\cup 222a
\cap 2229
\emptyset 2205
\mathbb{R} 211d
\mathbb{Z} 2124
\mathbb{N} 2115
\mathbb{Q} 211a
\mathbb{C} 2102
^\circ b0 2da ba 2218
. 3002
, 3001
" 201c 201d
' 2019 2018 2032
\ldots 2026
'' 2033
( 3008 27e8
) 3009 27e9
\alpha 3b1
\beta 3b2
\gamma 3b3
\delta 3b4
\epsilon 3b5
\theta 3b8
\lambda 3bb
\mu 3bc
\pi 3c0
\rho 3c1
\sigma 3c3
\tau 3c4
\phi 3c6
\omega 3c9
\Delta 394
\Omega 3a9
\Phi 3a6
\Sigma 3a3
"""
"""A command, and the code points of the characters that mean it."""

SYMBOLS = {
    chr(int(point, 16)): f"{command} " if "\\" in command and command[-1].isalpha() else command
    for command, *points in map(str.split, _TABLE.strip().splitlines())
    for point in points
}
SYMBOLS |= {
    "\u221a": "\\sqrt",
    "\u221b": "\\sqrt[3]",
    "\u221c": "\\sqrt[4]",
    "\u2103": "^\\circ C",
    "\u2109": "^\\circ F",
    "\u300c": "",
    "\u300d": "",
}
_FORMS = (
    ("^", "\u00b9\u00b2\u00b3\u2070\u2071\u2074-\u2079\u207a\u207b\u207d\u207e\u207f"),
    ("_", "\u2080-\u2089\u208a\u208b\u2090\u2099"),
)
_RAISED_OR_LOWERED = tuple((sign, re.compile(f"[{characters}]+")) for sign, characters in _FORMS)
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")


def in_ascii(text: str) -> str:
    """Return a text with symbols, raised and lowered digits, fractions and wide forms in LaTeX."""
    for sign, runs in _RAISED_OR_LOWERED:
        text = runs.sub(rf"{sign}{{\g<0>}}", text)
    text = _VULGAR.sub(_fraction, text)
    for _ in range(2):  # Wide forms become symbols that are in the table.
        text = "".join(SYMBOLS.get(character, character) for character in text)
        text = unicodedata.normalize("NFKC", text)
    return text


def _fraction(match: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return f" \\frac{{{above}}}{{{below}}}" if below else match[0]

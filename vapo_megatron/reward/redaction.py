"""Keeps an endpoint's key out of what is printed or recorded of its replies."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable
from urllib.parse import quote

_SHORTEST_KEY = 4
"""A shorter key is none, and would be found in any text."""
_ENCODED_KEY = 8
"""From this length on a key is looked for in its encoded forms, too."""


def redactor(key: str) -> Callable[[str], str]:
    """Return what replaces the key in a text, as it is or encoded for a URL, in base64, ...."""
    if len(key) < _SHORTEST_KEY:
        return str
    forms = {key}
    if len(key) >= _ENCODED_KEY:
        raw = key.encode()
        forms |= {quote(key, safe=""), quote(key), html.escape(key)}
        # Libraries quote what they cannot read, as Python does.
        forms |= {json.dumps(key)[1:-1], repr(key)[1:-1]}
        forms |= {raw.hex(), key[::-1], *_base64_forms(raw)}
    longest_first = sorted(forms, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)), re.IGNORECASE)
    return lambda text: pattern.sub("[the key]", text)


def _base64_forms(raw: bytes) -> list[str]:
    """Return the digits that only the bytes decide, wherever in a longer text they stand."""
    found = []
    for before in range(3):
        digits = base64.b64encode(bytes(before) + raw).decode().rstrip("=")
        first, last = -(-before * 8 // 6), (before + len(raw)) * 8 // 6
        found += [digits[first:last], digits[first:last].translate(str.maketrans("+/", "-_"))]
    return found

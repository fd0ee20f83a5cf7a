"""How a report becomes one file: slots are filled, style and scripts go inside, nothing is loaded.

The page's content security policy lets its own script alone run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TypeVar

from vapo_megatron.data.storage import replace_file

_T = TypeVar("_T")

_SCRIPTS = (
    "report_page.js",
    "uplot/uPlot.iife.min.js",
    "report_curves.js",
    "report_arms.js",
    "report_rollouts.js",
    "report_plots.js",
)
_STYLES = ("uplot/uPlot.min.css", "report.css")


def write_page(out: Path, content: str, slots: Mapping[str, str]) -> Path:
    """Fill the frame and what stands in it, write the page to `out` and return `out`.

    Args:
        out: replaced as a whole.
        content: file of the package; `{{name}}` in it stands for the slot of that name.
        slots: HTML, in which text of a run is escaped; of the frame `kind`, `title`, `subtitle` and
            `data`, and those of the content.
    """
    # The licence asks that its text goes along with every copy.
    licence = f"\n/*! {_read('uplot/LICENSE')}*/\n"
    script = licence + "".join(map(_read, _SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    given = {"style": "\n".join(map(_read, _STYLES)), "script": script, "hash": f"sha256-{digest}"}
    given["content"] = _fill(_read(content), slots)
    page = _fill(_read("report_frame.html"), {**given, **slots})
    # Text from a model may hold lone surrogates, which UTF-8 cannot.
    replace_file(out, page.encode("utf-8", "replace").decode("utf-8"))
    return out


def _fill(template: str, slots: Mapping[str, str]) -> str:
    """In one pass, so that nothing in a slot's text is read as a slot."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: slots[match[1]], template)


def _read(name: str) -> str:
    return resources.files("vapo_megatron.run.report").joinpath(name).read_text(encoding="utf-8")


def script_json(data: object) -> str:
    """Return JSON that may stand in a script element."""
    # "<" would let a string close the script element that the JSON stands in.
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def escape(text: object) -> str:
    """Return text that HTML shows as it is, inside an element or a quoted attribute."""
    return html.escape(str(text), quote=True)


def spread(items: Sequence[_T], most: int) -> Sequence[_T]:
    """Return at most so many of the items, evenly from the first to the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def breakable(name: object) -> str:
    """As escape; a line may end after the name's dots, slashes and underscores."""
    return re.sub(r"([._/])(?=[A-Za-z])", r"\1<wbr>", escape(name))


_TURNING = [0x61C, 0x200B, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF]
_UNSEEN = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
_UNSEEN |= {code: f"\u27e8U+{code:04X}\u27e9" for code in [*range(0x7F, 0xA0), *_TURNING]}


def visible(text: str) -> str:
    """Return a model's text with signs for what nobody sees, or what turns the text around it.

    Control characters become their pictures (a null U+2400); zero-width and directional ones their
    numbers in angle brackets. Joiners, which emoji and some scripts need, stay.
    """
    return text.translate(_UNSEEN)

"""Makes a self-contained page: fills a template's slots, inlines style and scripts.

The page's content security policy allows only its own script.
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
from typing import Any, TypeVar

import yaml

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


def write_page(
    out: Path, content: str, slots: Mapping[str, str], *, has_script: bool = True
) -> Path:
    """Fill the frame and its content, write the page to `out` and return `out`.

    Args:
        out: replaced atomically.
        content: template of the package, with `{{name}}` for each slot.
        slots: HTML with escaped text: the content's, and `kind`, `title`, `subtitle`, `data` of the
            frame.
        has_script: curves are drawn from `data`; otherwise the page is HTML and style alone.
    """
    # The licence requires its text in every copy.
    licence = f"\n/*! {_read('uplot/LICENSE')}*/\n"
    script = licence + "".join(map(_read, _SCRIPTS)) if has_script else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    given = {"style": "\n".join(map(_read, _STYLES)), "script": script, "hash": f"sha256-{digest}"}
    given["content"] = _fill(_read(content), slots)
    page = _fill(_read("report_frame.html"), {**given, **slots})
    # A model's text may hold lone surrogates, which UTF-8 cannot encode.
    replace_file(out, page.encode("utf-8", "replace").decode("utf-8"))
    return out


def _fill(template: str, slots: Mapping[str, str]) -> str:
    """Fill all slots in one pass, so that a slot's text is never taken for a slot."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: slots[match[1]], template)


def _read(name: str) -> str:
    return resources.files("vapo_megatron.run.report").joinpath(name).read_text(encoding="utf-8")


def script_json(data: object) -> str:
    """Return JSON for a script element, which no string in it can close."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def escape(text: object) -> str:
    """Escape text for an element or a quoted attribute."""
    return html.escape(str(text), quote=True)


def yaml_value(value: Any) -> str:
    """Return a field's value as YAML shows it."""
    if isinstance(value, float):
        return f"{value:g}"
    text = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return text.removesuffix("\n...\n").strip()


def spread(items: Sequence[_T], most: int) -> Sequence[_T]:
    """Return at most `most` items, evenly spaced from the first to the last."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def breakable(name: object) -> str:
    """As escape; lines may break after dots, slashes and underscores."""
    return re.sub(r"([._/])(?=[A-Za-z])", r"\1<wbr>", escape(name))


def first_to_last(values: Sequence[float], form: str) -> str:
    """Return the first and the last value, formatted, with an arrow between; one value alone."""
    first, last = format(values[0], form), format(values[-1], form)
    return f"{first}<i>&rarr;</i>{last}" if len(values) > 1 else last


def card(label: str, value: str, note: str) -> str:
    """Return a headline number; the value is HTML."""
    return (
        f'<div class="figure"><div class="label">{escape(label)}</div>'
        f'<div class="value">{value}</div><div class="note">{escape(note)}</div></div>'
    )


_TURNING = [0x61C, 0x200B, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2060, 0x2070), 0xFEFF]
_UNSEEN = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
_UNSEEN |= {code: f"\u27e8U+{code:04X}\u27e9" for code in [*range(0x7F, 0xA0), *_TURNING]}


def visible(text: str) -> str:
    """Make a text's invisible and direction-changing characters visible.

    Control characters become their pictures (a null U+2400); zero-width and directional ones their
    code points in angle brackets. Joiners, which emoji and some scripts need, stay.
    """
    return text.translate(_UNSEEN)

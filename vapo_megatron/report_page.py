"""How a report becomes one file: slots are filled, style and scripts go inside, nothing is loaded.

The page's content security policy lets its own script alone run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from vapo_megatron.run_directory import replace_file

_SCRIPTS = ("report_curves.js", "report_rollouts.js", "report_plots.js")


def write_page(out: Path, template: str, slots: Mapping[str, str]) -> Path:
    """Fill a template of the package, write it to `out` and return `out`.

    Args:
        out: replaced as a whole.
        template: file name; `{{name}}` in it stands for the slot of that name.
        slots: HTML, in which text of a run is escaped. `style` and `script` are given here.
    """
    script = "\n" + "".join(map(_read, _SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    given = {"style": _read("report.css"), "script": script, "hash": f"sha256-{digest}"}
    # In one pass, so that nothing in a slot's text is read as a slot.
    page = re.sub(r"\{\{(\w+)\}\}", lambda match: {**given, **slots}[match[1]], _read(template))
    # Text from a model may hold lone surrogates, which UTF-8 cannot.
    replace_file(out, page.encode("utf-8", "replace").decode("utf-8"))
    return out


def _read(name: str) -> str:
    return resources.files("vapo_megatron").joinpath(name).read_text(encoding="utf-8")


def script_json(data: object) -> str:
    """Return JSON that may stand in a script element."""
    # "<" would let a string close the script element that the JSON stands in.
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def escape(text: object) -> str:
    """Return text that HTML shows as it is, inside an element or a quoted attribute."""
    return html.escape(str(text), quote=True)

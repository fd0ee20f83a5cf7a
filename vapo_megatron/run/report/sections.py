"""The report's text: techniques with their settings, and the configuration.

Every function returns HTML in which all text that comes from the run is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from vapo_megatron.config.schema import VapoConfig
from vapo_megatron.config.techniques import TECHNIQUES, settings
from vapo_megatron.run.report.html import escape

_UNKNOWN = '<p class="empty">config.yaml not found.</p>'


def techniques(config: Mapping[str, Any]) -> str:
    """Return a list of the seven techniques, each with its fields, and whether it is on."""
    if not config:
        return _UNKNOWN
    found = settings(config)
    items = []
    for number, (name, fields, is_on, sentence) in enumerate(TECHNIQUES, 1):
        state = "on" if is_on(found) else "off"
        values = "".join(
            f"<code>{field} = {escape(yaml_value(found[field]))}</code>" for field in fields.split()
        )
        items.append(
            f'<li class="{state}"><div class="head"><b>{number}</b><h3>{name}</h3>'
            f'<span class="state">{state}</span></div><p>{sentence}</p>'
            f'<div class="settings">{values}</div></li>'
        )
    return f'<ol class="techniques">{"".join(items)}</ol>'


def configuration(config: Mapping[str, Any]) -> str:
    """Return every field by section; those that differ from their default stand out."""
    if not config:
        return _UNKNOWN
    defaults = VapoConfig().model_dump()
    top = {name: value for name, value in config.items() if not isinstance(value, dict)}
    sections = {"run": top} if top else {}
    sections |= {name: value for name, value in config.items() if isinstance(value, dict)}
    blocks = []
    for name, fields in sections.items():
        of_section = defaults if name == "run" else defaults.get(name, {})
        rows = "".join(_field(field, value, of_section) for field, value in fields.items())
        blocks.append(f"<section><h3>{escape(name)}</h3><table>{rows}</table></section>")
    return f'<div class="config">{"".join(blocks)}</div>'


def _field(name: str, value: Any, defaults: Mapping[str, Any]) -> str:
    changed = ""
    if name in defaults and defaults[name] != value:
        changed = f' class="changed" title="default: {escape(yaml_value(defaults[name]))}"'
    return f"<tr{changed}><th>{escape(name)}</th><td>{escape(yaml_value(value))}</td></tr>"


def yaml_value(value: Any) -> str:
    """Return a field's value as YAML shows it."""
    if isinstance(value, float):
        return f"{value:g}"
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    )

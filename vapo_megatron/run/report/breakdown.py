"""A run's metrics by verifier and by source: their curves, and a table of the last values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from vapo_megatron.config.metrics import KINDS, Named, named
from vapo_megatron.run.report.comparison import table
from vapo_megatron.run.report.html import first_to_last

_CHARTS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("Accuracy", "reward", "accuracy", {"low": 0, "high": 1}),
    ("Held-out accuracy", "evaluation", "avg@", {"low": 0, "high": 1}),
    ("Reward", "reward", "reward_mean", {}),
    ("Held-out reward", "evaluation", "reward_mean", {}),
    ("Explained variance", "critic", "explained_variance", {"high": 1, "floor": -1}),
    ("Mean error of the values", "critic", "value_error_mean", {}),
    ("Response length", "reward", "response_length_mean", {"low": 0}),
    ("Share of the batch", "reward", "share", {"low": 0, "high": 1}),
    ("Failed verdicts", "reward", "failed_fraction", {"low": 0}),
    ("Held-out response length", "evaluation", "response_length_mean", {"low": 0}),
)
"""Title, group and beginning of what is measured, and the chart's axis."""
_COLUMNS = ("Share of the batch", "Accuracy", "Held-out accuracy", "Reward", "Response length")

_Row = Mapping[str, Any]
_Chart = tuple[str, tuple[tuple[str, str], ...], dict[str, Any]]


def charts_by_name(names: Collection[str]) -> list[tuple[_Chart, list[str]]]:
    """Return a chart for each kind and measure: title, (metric, label) of each curve, and axis.

    Args:
        names: of all metrics that the run's rows have.

    Returns:
        The charts, each with all labels of its kind, in order.
    """
    charts = []
    for kind in KINDS:
        parts = [part for name in names if (part := named(name)) and part.kind == kind]
        labels = sorted({part.label for part in parts})
        for title, group, what, axis in _CHARTS:
            if some := _measured(names, kind, group, what):
                series = tuple((metric, part.label) for metric, part in some)
                charts.append(((f"{title} by {kind}", series, axis), labels))
    return charts


def section(rows: Sequence[_Row]) -> str:
    """Return the page's section with the first and last values; empty: there is one name alone."""
    names = dict.fromkeys(name for row in rows for name in row)
    measures = {title: (group, what) for title, group, what, _ in _CHARTS}
    cells: dict[str, list[str]] = {}
    for kind in KINDS:
        found = [
            {part.label: metric for metric, part in _measured(names, kind, *measures[title])}
            for title in _COLUMNS
        ]
        for label in sorted({label for of_title in found for label in of_title}):
            cells[f"{kind} {label}"] = [
                _cell(rows, of_title.get(label), title) for title, of_title in zip(_COLUMNS, found)
            ]
    if not cells:
        return ""
    return (
        "<section><h2>By verifier and source</h2>"
        '<p class="about">First and last value. A dash: not measured.</p>'
        f"{table(_COLUMNS, cells.items())}</section>"
    )


def _measured(names: Collection[str], kind: str, group: str, what: str) -> list[tuple[str, Named]]:
    """Return the metrics of one measure, with their parts, by label."""
    parts = ((name, named(name)) for name in names)
    found = [
        (name, part)
        for name, part in parts
        if part and (part.group, part.kind) == (group, kind) and part.what.startswith(what)
    ]
    return sorted(found, key=lambda item: item[1].label)


def _cell(rows: Sequence[_Row], name: str | None, title: str) -> str:
    values = [row[name] for row in rows if name and row.get(name) is not None]
    if not values:
        return "-"
    form = ",.0f" if title == "Response length" else ".3f"
    return first_to_last(values, form)

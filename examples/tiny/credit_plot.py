"""Line charts of the credit example as SVG: a line for each arm, a band over its seeds."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from credit_table import Curve, at

COLORS = ("#2563eb", "#dc2626", "#d97706", "#059669", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP = 360, 220, 52, 34, 40
"""Of one panel's axes, and the room around them. Pixels."""


@dataclasses.dataclass(frozen=True)
class Line:
    """An arm's curves, one per seed."""

    title: str
    color: str
    curves: Sequence[Curve]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str
    x_title: str
    lines: Sequence[Line]
    low: float = 0.0
    high: float = 1.0
    ticks: Sequence[tuple[float, str]] = ()
    """Places and labels on the x axis; none: five numbers from 0."""


def mean_and_band(curves: Sequence[Curve]) -> list[tuple[float, float, float, float]]:
    """Return (x, mean, mean - deviation, mean + deviation), where all curves have a value.

    x: every one at which some curve has a point.
    """
    found = []
    for x in sorted({x for curve in curves for x, _ in curve}):
        values = [y for curve in curves if (y := at(curve, x)) is not None]
        if len(values) == len(curves):
            mean = statistics.fmean(values)
            deviation = statistics.stdev(values) if len(values) > 1 else 0.0
            found.append((x, mean, mean - deviation, mean + deviation))
    return found


def draw(panels: Sequence[Panel], columns: int = 2) -> str:
    """Return an SVG of panels, with one legend for all."""
    rows = math.ceil(len(panels) / columns)
    titles = {line.title: line.color for panel in panels for line in panel.lines}
    legend_rows = math.ceil(len(titles) / 4)
    legend_height = 20 * legend_rows + 12
    width = columns * (LEFT + PANEL_WIDTH + GAP)
    row_height = TOP + PANEL_HEIGHT + 50
    height = legend_height + rows * row_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        "<style>text { fill: #333 } .title { font-weight: bold } "
        ".axis { stroke: #999; fill: none } .grid { stroke: #e5e7eb }</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for i, (title, color) in enumerate(titles.items()):
        x, y = LEFT + (width - LEFT) / 4 * (i % 4), 18 + 20 * (i // 4)
        parts.append(
            f'<line x1="{x:.0f}" x2="{x + 18:.0f}" y1="{y - 4}" y2="{y - 4}" stroke="{color}" '
            f'stroke-width="2.5"/><text x="{x + 24:.0f}" y="{y}">{title}</text>'
        )
    for i, panel in enumerate(panels):
        left = LEFT + (i % columns) * (LEFT + PANEL_WIDTH + GAP)
        parts += _panel(panel, left, legend_height + (i // columns) * row_height + TOP)
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, left: float, top: float) -> list[str]:
    bands = [(line, mean_and_band(line.curves)) for line in panel.lines if line.curves]
    longest = max((points[-1][0] for _, points in bands if points), default=1.0) or 1.0
    bottom = top + PANEL_HEIGHT

    def x(value: float) -> float:
        return left + PANEL_WIDTH * value / longest

    def y(value: float) -> float:
        share = (value - panel.low) / (panel.high - panel.low)
        return bottom - PANEL_HEIGHT * min(max(share, 0.0), 1.0)

    right = left + PANEL_WIDTH
    parts = [
        f'<text x="{left}" y="{top - 12}" class="title">{panel.title}</text>',
        f'<text x="{right}" y="{bottom + 34}" text-anchor="end">{panel.x_title}</text>',
    ]
    for i in range(5):
        value = panel.low + (panel.high - panel.low) * i / 4
        parts.append(
            f'<line x1="{left}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}" '
            f'class="grid"/><text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">'
            f"{value:.2g}</text>"
        )
    fifths = [longest * i / 4 for i in range(5)]
    for place, label in panel.ticks or [(place, f"{place:,.0f}") for place in fifths]:
        parts.append(
            f'<text x="{x(place):.1f}" y="{bottom + 17}" text-anchor="middle">{label}</text>'
        )
    for line, points in bands:
        if not points:
            continue
        upper = [f"{x(a):.1f},{y(high):.1f}" for a, _, _, high in points]
        lower = [f"{x(a):.1f},{y(low):.1f}" for a, _, low, _ in reversed(points)]
        if len(line.curves) > 1:
            parts.append(
                f'<polygon points="{" ".join(upper + lower)}" fill="{line.color}" opacity=".15"/>'
            )
        middle = " ".join(f"{x(a):.1f},{y(mean):.1f}" for a, mean, _, _ in points)
        parts.append(
            f'<polyline points="{middle}" fill="none" stroke="{line.color}" stroke-width="2"/>'
        )
    parts.append(f'<path d="M{left} {top}V{bottom}H{right}" class="axis"/>')
    return parts

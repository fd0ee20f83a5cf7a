"""Charts as SVG: a line for each arm with a band over its seeds, or points that are joined."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

COLORS = ("#2563eb", "#dc2626", "#d97706", "#059669", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP = 360, 220, 52, 34, 40
"""Of one panel's axes, and the room around them. Pixels."""

Curve = Sequence[tuple[float, float]]
"""Points, by x where it is interpolated."""


@dataclasses.dataclass(frozen=True)
class Line:
    """An arm's curves, one per seed."""

    title: str
    color: str
    curves: Sequence[Curve]
    radius: float | None = None
    """Of points; each curve is drawn by itself, as points that are joined. None: mean and band."""


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
    levels: Sequence[tuple[float, str]] = ()
    """The same on the y axis; none: five numbers from low to high."""
    end: float | None = None
    """Right end of the x axis; None: of the longest line."""


def at(curve: Curve, x: float) -> float | None:
    """Interpolate a curve linearly; None: x lies outside."""
    for (x0, y0), (x1, y1) in zip(curve, curve[1:]):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return None


def reached(curve: Curve, level: float) -> float | None:
    """Return where a curve first reaches a level, interpolated; None: nowhere."""
    before: tuple[float, float] | None = None
    for x, y in curve:
        if y >= level:
            if before is None or before[1] == y:
                return x
            return before[0] + (x - before[0]) * (level - before[1]) / (y - before[1])
        before = (x, y)
    return None


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


def draw(panels: Sequence[Panel], columns: int = 2, per_row: int = 4) -> str:
    """Return an SVG of panels, with one legend for all; per_row: titles in a row of the legend."""
    rows = math.ceil(len(panels) / columns)
    titles = {line.title: line.color for panel in panels for line in panel.lines}
    legend_height = 20 * math.ceil(len(titles) / per_row) + 12
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
        x, y = LEFT + (width - LEFT) / per_row * (i % per_row), 18 + 20 * (i // per_row)
        parts.append(
            f'<line x1="{x:.0f}" x2="{x + 18:.0f}" y1="{y - 4}" y2="{y - 4}" stroke="{color}" '
            f'stroke-width="2.5"/><text x="{x + 24:.0f}" y="{y}">{title}</text>'
        )
    for i, panel in enumerate(panels):
        left = LEFT + (i % columns) * (LEFT + PANEL_WIDTH + GAP)
        parts += _panel(panel, left, legend_height + (i // columns) * row_height + TOP)
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, left: float, top: float) -> list[str]:
    means = [[] if line.radius else mean_and_band(line.curves) for line in panel.lines]
    longest = panel.end or max((found[-1][0] for found in means if found), default=1.0) or 1.0
    bottom, right = top + PANEL_HEIGHT, left + PANEL_WIDTH

    def x(value: float) -> float:
        return left + PANEL_WIDTH * value / longest

    def y(value: float) -> float:
        share = (value - panel.low) / (panel.high - panel.low)
        return bottom - PANEL_HEIGHT * min(max(share, 0.0), 1.0)

    def joined(points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)

    parts = [
        f'<text x="{left}" y="{top - 12}" class="title">{panel.title}</text>',
        f'<text x="{right}" y="{bottom + 34}" text-anchor="end">{panel.x_title}</text>',
    ]
    quarters = [panel.low + (panel.high - panel.low) * i / 4 for i in range(5)]
    for level, label in panel.levels or [(value, f"{value:.2g}") for value in quarters]:
        parts.append(
            f'<line x1="{left}" x2="{right}" y1="{y(level):.1f}" y2="{y(level):.1f}" '
            f'class="grid"/><text x="{left - 6}" y="{y(level) + 4:.1f}" text-anchor="end">'
            f"{label}</text>"
        )
    fifths = [longest * i / 4 for i in range(5)]
    for place, label in panel.ticks or [(place, f"{place:,.0f}") for place in fifths]:
        parts.append(
            f'<text x="{x(place):.1f}" y="{bottom + 17}" text-anchor="middle">{label}</text>'
        )
    for line, found in zip(panel.lines, means, strict=True):
        for curve in line.curves if line.radius else ():
            if len(curve) > 1:
                parts.append(
                    f'<polyline points="{joined(curve)}" fill="none" stroke="{line.color}" '
                    'opacity=".6"/>'
                )
            parts += [
                f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="{line.radius}" fill="{line.color}"/>'
                for a, b in curve
            ]
        if found:
            band = [(a, high) for a, _, _, high in found]
            band += [(a, low) for a, _, low, _ in reversed(found)]
            if len(line.curves) > 1:
                parts.append(
                    f'<polygon points="{joined(band)}" fill="{line.color}" opacity=".15"/>'
                )
            middle = joined((a, mean) for a, mean, _, _ in found)
            parts.append(
                f'<polyline points="{middle}" fill="none" stroke="{line.color}" stroke-width="2"/>'
            )
    parts.append(f'<path d="M{left} {top}V{bottom}H{right}" class="axis"/>')
    return parts

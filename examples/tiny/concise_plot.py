"""The concise example's plot: response length against the share of negative rewards, as an SVG."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from concise_jobs import SETS
from concise_table import Second, Seconds

WIDTH, HEIGHT = 860, 380
PLOT_WIDTH, PLOT_HEIGHT, TOP, LEFT = 340, 230, 92, 56
"""Of one panel: the size of its axes, and the room above and to the left of them. Pixels."""
COLORS = dict(zip(SETS, ("#2563eb", "#059669", "#d97706", "#dc2626"), strict=True))

Point = tuple[float, float]


def plot(found: Seconds) -> str:
    """Return an SVG of two panels.

    Left: a point for each second phase; its share of negative rewards in training, and the change
    of the mean length of its responses to held-out problems. Right: a point for each training step,
    with the mean length relative to the phase's first step; points of a phase are joined.
    """
    runs = [(name, one) for name, of_seeds in found.items() for one in of_seeds.values()]
    points = [(name, [_whole(one)]) for name, one in runs]
    lines = [(name, _steps(one)) for name, one in runs]
    legend = [
        f'<circle cx="{LEFT + 6 + 400 * (i % 2)}" cy="{16 + 20 * (i // 2)}" r="5" '
        f'fill="{COLORS[name]}"/><text x="{LEFT + 18 + 400 * (i % 2)}" y="{20 + 20 * (i // 2)}">'
        f"{SETS[name].title}</text>"
        for i, name in enumerate(found)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="12">\n<style>\n'
        "text { fill: #333 } .title { font-weight: bold } .axis { stroke: #999; fill: none }\n"
        ".zero { stroke: #bbb; stroke-dasharray: 4 3 } .line { fill: none; opacity: 0.6 }\n"
        f'</style>\n<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n'
        + "\n".join(legend)
        + _panel("held-out response length after the second phase", LEFT, points, radius=6)
        + _panel("training response length, by step", LEFT + PLOT_WIDTH + 80, lines, radius=2.5)
        + "</svg>\n"
    )


def _whole(one: Second) -> Point:
    return statistics.fmean(one.negative), one.after.length / one.before.length - 1


def _steps(one: Second) -> list[Point]:
    return [(n, length / one.lengths[0] - 1) for n, length in zip(one.negative, one.lengths)]


def _panel(
    title: str, left: int, series: Sequence[tuple[str, Sequence[Point]]], radius: float
) -> str:
    """Draw one set of axes: share of negative rewards from 0 to 1, change of length in tenths."""
    heights = [y for _, points in series for _, y in points] + [0.0]
    lowest = math.floor(10 * min(heights)) / 10
    highest = max(math.ceil(10 * max(heights)) / 10, lowest + 0.1)
    bottom = TOP + PLOT_HEIGHT

    def x(share: float) -> float:
        return left + PLOT_WIDTH * share

    def y(change: float) -> float:
        return bottom - PLOT_HEIGHT * (change - lowest) / (highest - lowest)

    parts = [
        f'\n<text x="{left}" y="{TOP - 26}" class="title">{title}</text>',
        f'<text x="{left}" y="{TOP - 10}">change</text>',
        f'<path d="M{left} {TOP}V{bottom}H{left + PLOT_WIDTH}" class="axis"/>',
        f'<line x1="{left}" x2="{left + PLOT_WIDTH}" y1="{y(0):.1f}" y2="{y(0):.1f}" '
        'class="zero"/>',
        f'<text x="{left + PLOT_WIDTH}" y="{bottom + 36}" text-anchor="end">'
        "share of negative rewards</text>",
    ]
    for tenth in range(round(10 * lowest), round(10 * highest) + 1):
        at = y(tenth / 10) + 4
        parts.append(
            f'<text x="{left - 6}" y="{at:.1f}" text-anchor="end">{10 * tenth:+d} %</text>'
        )
    for quarter in range(5):
        at = x(quarter / 4)
        parts.append(
            f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{quarter / 4:g}</text>'
        )
    for name, points in series:
        color = COLORS[name]
        if len(points) > 1:
            joined = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
            parts.append(f'<polyline points="{joined}" class="line" stroke="{color}"/>')
        parts += [
            f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="{radius}" fill="{color}"/>'
            for a, b in points
        ]
    return "\n".join(parts) + "\n"

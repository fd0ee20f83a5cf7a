"""Draws docs/images from a run directory: its learning curve, and its report as chromium shows it.

    python docs/make_images.py runs/tiny/seed_0/vapo

The curve is an SVG written here, from metrics.jsonl alone. The screenshot needs Debian's package
chromium; without it the curve is all that is drawn.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vapo_megatron.config.metrics import accuracy_name
from vapo_megatron.run.directory import read_run
from vapo_megatron.run.report.page import build_report

IMAGES = Path(__file__).resolve().parent / "images"
WIDTH, HEIGHT = 860, 300
PLOT_WIDTH, PLOT_HEIGHT, TOP, LEFT = 340, 190, 60, 50
"""Of one panel: the size of its axes, and the room above and to the left of them. Pixels."""

Points = Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """One set of axes; both start at 0."""

    title: str
    line: Points
    """(step, value) of each training step."""
    dots: Points
    """(step, value) of each evaluation."""
    highest: float
    """Value at the top of the axis."""
    format: str
    """Of the axis' numbers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Draw a run; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="DIR")
    arguments = parser.parse_args(argv)
    run = read_run(arguments.run)
    arguments.out.mkdir(parents=True, exist_ok=True)
    curve = arguments.out / "learning_curve.svg"
    curve.write_text(learning_curve(run.rows, value_pretraining_steps(run.config)))
    print(curve)
    chromium = shutil.which("chromium")
    if chromium is None:
        print("no chromium on PATH: no picture of the report", file=sys.stderr)
        return 0
    picture = arguments.out / "report.png"
    photograph(chromium, build_report(arguments.run), picture)
    print(picture)
    return 0


def value_pretraining_steps(config: Mapping[str, Any]) -> int:
    """Return the first steps, in which the critic alone trained."""
    return config.get("algorithm", {}).get("value_pretraining_steps", 0)


def learning_curve(rows: Sequence[Mapping[str, Any]], pretraining: int) -> str:
    """Return an SVG of accuracy and response length over the steps.

    Args:
        rows: of metrics.jsonl.
        pretraining: steps of value pretraining; their part of the axes is shaded.
    """

    def column(name: str) -> Points:
        return [(row["step"], row[name]) for row in rows if row.get(name) is not None]

    held_out = next((name for row in rows if (name := accuracy_name(row))), "")
    lengths = column("rollout/response_length_mean")
    longest = max((value for _, value in lengths), default=1.0)
    panels = [
        Panel("accuracy", column("reward/correct_fraction"), column(held_out), 1.0, ".1f"),
        Panel(
            "response length, tokens",
            lengths,
            column("evaluation/response_length_mean"),
            50 * (longest // 50 + 1),
            ".0f",
        ),
    ]
    last_step = max((row["step"] for row in rows), default=1)
    drawn = [
        _panel(panel, LEFT + i * (PLOT_WIDTH + 80), last_step, pretraining)
        for i, panel in enumerate(panels)
    ]
    legend = (
        f'<line x1="{LEFT}" y1="16" x2="{LEFT + 24}" y2="16" class="line"/>'
        f'<text x="{LEFT + 30}" y="20">training responses</text>'
        f'<circle cx="{LEFT + 172}" cy="16" r="4.5" class="dot"/>'
        f'<text x="{LEFT + 182}" y="20">held-out problems, {held_out.removeprefix("evaluation/")}'
        f'</text><rect x="{LEFT + 368}" y="9" width="24" height="14" class="shade"/>'
        f'<text x="{LEFT + 398}" y="20">value pretraining: the critic alone trains</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="12">\n<style>\n'
        "text { fill: #333 } .title { font-weight: bold }\n"
        ".axis { stroke: #999; fill: none } .shade { fill: #e8eef7 }\n"
        ".line { stroke: #2563eb; stroke-width: 2; fill: none } .dot { fill: #dc2626 }\n"
        f'</style>\n<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n'
        + "\n".join([legend, *drawn])
        + "\n</svg>\n"
    )


def _panel(panel: Panel, left: int, last_step: int, pretraining: int) -> str:
    bottom, right = TOP + PLOT_HEIGHT, left + PLOT_WIDTH

    def x(step: float) -> float:
        return left + PLOT_WIDTH * step / last_step

    def y(value: float) -> float:
        return bottom - PLOT_HEIGHT * value / panel.highest

    parts = [f'<text x="{left}" y="{TOP - 12}" class="title">{panel.title}</text>']
    if pretraining:
        width = x(pretraining) - left
        parts.append(
            f'<rect x="{left}" y="{TOP}" width="{width:.1f}" height="{PLOT_HEIGHT}" class="shade"/>'
        )
    parts.append(f'<path d="M{left} {TOP}V{bottom}H{right}" class="axis"/>')
    for part in (0.0, 0.5, 1.0):
        value = panel.highest * part
        text = f"{value:{panel.format}}"
        parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{text}</text>')
    for step in range(0, last_step + 1, _tick(last_step)):
        parts.append(
            f'<text x="{x(step):.1f}" y="{bottom + 18}" text-anchor="middle">{step}</text>'
        )
    parts.append(f'<text x="{right}" y="{bottom + 36}" text-anchor="end">step</text>')
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in panel.line)
    parts.append(f'<polyline points="{points}" class="line"/>')
    parts += [
        f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="4.5" class="dot"/>'
        for step, value in panel.dots
    ]
    return "\n".join(parts)


def _tick(last_step: int) -> int:
    """Return the distance of the axis' numbers: 1, 2 or 5 times a power of ten, at most 6 of it."""
    power = 1
    while True:
        for distance in (power, 2 * power, 5 * power):
            if last_step <= 6 * distance:
                return distance
        power *= 10


def photograph(chromium: str, page: Path, picture: Path) -> None:
    """Write a PNG of the top of a page, which loads nothing from anywhere."""
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1240,900",
        f"--screenshot={picture.resolve()}", page.resolve().as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)


if __name__ == "__main__":
    sys.exit(main())

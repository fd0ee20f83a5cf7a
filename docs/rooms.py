"""The rooms of the package from what its files import: their picture, and a table of them.

A room stands above all rooms that it imports from. Of its arrows only those are drawn that no other
path says already. make_reference.py writes both into the pages.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "vapo_megatron"
PICTURE = DOCS / "images/architecture.svg"

WIDTH, BOX_WIDTH, BOX_HEIGHT, FLOOR_HEIGHT = 860, 132, 34, 70

Arrows = Mapping[str, frozenset[str]]


def imports() -> dict[str, frozenset[str]]:
    """Return which rooms each room imports from, inside functions too; a shim is no room."""
    names = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    found = {}
    for room in sorted(names):
        used = {
            name
            for path in (PACKAGE / room).rglob("*.py")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom | ast.Import)
            for name in _imported(node)
        }
        parts = (name.split(".") for name in used if name.startswith("vapo_megatron."))
        found[room] = frozenset({part[1] for part in parts} & set(names) - {room})
    return found


def table() -> str:
    """Return a table of the rooms, the top floor first, in their own words."""
    lines = ["| room | what it is |", "|---|---|"]
    for row in floors(imports())[::-1]:
        for room in row:
            sentence = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text()))
            lines.append(f"| [{room}/](../vapo_megatron/{room}) | {sentence} |")
    return "\n".join(lines) + "\n"


def _imported(node: ast.ImportFrom | ast.Import) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def floors(arrows: Arrows) -> list[list[str]]:
    """Return the rooms of each floor, the ground first."""

    @functools.cache
    def floor(room: str) -> int:
        return 1 + max((floor(other) for other in arrows[room]), default=-1)

    found: list[list[str]] = [[] for _ in range(1 + max(map(floor, arrows)))]
    for room in sorted(arrows):
        found[floor(room)].append(room)
    return found


def needed(arrows: Arrows) -> list[tuple[str, str]]:
    """Return the arrows that no longer path stands for."""

    @functools.cache
    def reached(room: str) -> frozenset[str]:
        return arrows[room].union(*(reached(other) for other in arrows[room]))

    return [
        (room, other)
        for room, others in arrows.items()
        for other in sorted(others)
        if not any(other in reached(between) for between in others)
    ]


def drawn() -> str:
    """Return the picture as SVG."""
    arrows = imports()
    rows = floors(arrows)[::-1]
    height = FLOOR_HEIGHT * len(rows)
    centers = {
        room: (WIDTH * (i + 1) / (len(row) + 1), FLOOR_HEIGHT * (y + 0.5))
        for y, row in enumerate(rows)
        for i, room in enumerate(row)
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="15" role="img">',
        "<title>The rooms of vapo_megatron; arrows are imports</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0L8,4L0,8z" fill="#8a94a6"/></marker></defs>',
    ]
    for room, other in needed(arrows):
        (x, y), (to_x, to_y) = centers[room], centers[other]
        y, to_y = y + BOX_HEIGHT / 2, to_y - BOX_HEIGHT / 2
        bend = (to_y - y) / 2
        parts.append(
            f'<path d="M{x:g},{y:g}C{x:g},{y + bend:g} {to_x:g},{to_y - bend:g} {to_x:g},{to_y:g}" '
            'fill="none" stroke="#8a94a6" stroke-width="1.3" marker-end="url(#tip)"/>'
        )
    for room, (x, y) in centers.items():
        parts.append(
            f'<rect x="{x - BOX_WIDTH / 2:g}" y="{y - BOX_HEIGHT / 2:g}" width="{BOX_WIDTH}" '
            f'height="{BOX_HEIGHT}" rx="6" fill="#eef2f8" stroke="#4a6fa5"/>'
            f'<text x="{x:g}" y="{y + 5:g}" text-anchor="middle" fill="#1c2733">{room}/</text>'
        )
    return "\n".join([*parts, "</svg>\n"])

"""Pass rates of problems over a run: how many are hopeless or mastered, what becomes of each.

Of those that it trained on, which it meets now and then, and of the held-out ones, all of which
every evaluation meets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vapo_megatron.run.report.html import spread

_MAX_POINTS = 100
_MAX_PROBLEMS = 40
_MAX_VISITS = 30

_Row = Mapping[str, Any]
_Visit = tuple[int, int, int]
"""Step, correct responses, responses."""


def problem_plots(trained_on: Sequence[_Row], held_out: Sequence[_Row]) -> Iterable[dict[str, Any]]:
    """Yield the plots of the rows of problems.jsonl and of held_out.jsonl."""
    for rows, how_many, which, visits in (
        (
            trained_on,
            "Are there problems left to learn from?",
            "Which problems are learnt, and which forgotten?",
            "visits",
        ),
        (
            held_out,
            "How many held-out problems has the policy mastered?",
            "Which held-out problems does it solve, and since when?",
            "evaluations",
        ),
    ):
        if not rows:
            continue
        yield {
            "title": how_many,
            "x": "step",
            "y": "share of the problems by right responses",
            "series": [
                {"label": name, "points": points} for name, points in _shares(rows) if points
            ],
            "low": 0,
            "high": 1,
        }
        visited = _visited(rows)
        shown = spread(visited, _MAX_PROBLEMS)
        if shown:
            of = f" of {len(visited)}" if len(shown) < len(visited) else ""
            yield {
                "title": which,
                "x": visits,
                "y": f"{len(shown)}{of} problems",
                "cells": [
                    {"name": f"problem {index}", "visits": spread(v, _MAX_VISITS)}
                    for index, v in shown
                ],
            }


def _shares(rows: Sequence[_Row]) -> list[tuple[str, list[list[float]]]]:
    """Share of the problems with no, some, only correct responses, of so many steps at a time."""
    at_a_time = -(-len(rows) // _MAX_POINTS)
    curves: dict[str, list[list[float]]] = {"none right": [], "some": [], "all": []}
    for start in range(0, len(rows), at_a_time):
        part = rows[start : start + at_a_time]
        kinds = [
            "none right" if n == 0 else "all" if n == row["group_size"] else "some"
            for row in part
            for n in row["correct"]
        ]
        step = sum(row["step"] for row in part) / len(part)
        for kind, points in curves.items():
            if kinds:
                points.append([step, kinds.count(kind) / len(kinds)])
    return list(curves.items())


def _visited(rows: Sequence[_Row]) -> list[tuple[int, list[_Visit]]]:
    """The problems that were met at two steps or more, the hardest first."""
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for row in rows:
        for index, correct in zip(row["problems"], row["correct"]):
            # A step may draw a problem more than once.
            right, of = found.setdefault(index, {}).get(row["step"], (0, 0))
            found[index][row["step"]] = (right + correct, of + row["group_size"])
    again = [
        (index, [(step, right, of) for step, (right, of) in sorted(visits.items())])
        for index, visits in found.items()
        if len(visits) > 1
    ]
    return sorted(again, key=lambda one: (sum(r / of for _, r, of in one[1]) / len(one[1]), one[0]))

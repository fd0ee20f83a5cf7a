"""Plots of problems' pass rates over a run: how many are never or always solved, and each one's.

Training visits a problem now and then; every evaluation covers all held-out problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vapo_megatron.run.report.html import spread

_MAX_POINTS, _MAX_PROBLEMS, _MAX_VISITS = 100, 40, 30

_Row = Mapping[str, Any]
_Visit = tuple[int, int, int]
"""Step, correct responses, responses."""


def problem_plots(trained_on: Sequence[_Row], held_out: Sequence[_Row]) -> Iterable[dict[str, Any]]:
    """Yield the plots of the rows of problems.jsonl and of held_out.jsonl."""
    if trained_on:
        yield _shares("Are there problems left to learn from?", trained_on)
        yield _cells("Which problems are learnt, and which forgotten?", "visits", trained_on)
    if held_out:
        yield _shares("How many held-out problems has the policy mastered?", held_out)
        title = "Which held-out problems does it solve, and since when?"
        yield _cells(title, "evaluations", held_out)


def _shares(title: str, rows: Sequence[_Row]) -> dict[str, Any]:
    """Share of the problems with no, some, only correct responses, in at most _MAX_POINTS bins."""
    at_a_time = -(-len(rows) // _MAX_POINTS)
    curves: dict[str, list[list[float]]] = {"none correct": [], "some": [], "all": []}
    for start in range(0, len(rows), at_a_time):
        part = rows[start : start + at_a_time]
        kinds = [
            "none correct" if n == 0 else "all" if n == size else "some"
            for row in part
            for n, size in zip(row["correct"], _sizes(row))
        ]
        step = sum(row["step"] for row in part) / len(part)
        for kind, points in curves.items():
            if kinds:
                points.append([step, kinds.count(kind) / len(kinds)])
    series = [{"label": kind, "points": points} for kind, points in curves.items() if points]
    y = "share of problems by correct responses"
    return {"title": title, "x": "step", "y": y, "series": series, "low": 0, "high": 1}


def _sizes(row: _Row) -> Sequence[int]:
    """Responses to each problem: one number in the file where all have it."""
    size = row["group_size"]
    return [size] * len(row["problems"]) if isinstance(size, int) else size


def _cells(title: str, visits: str, rows: Sequence[_Row]) -> dict[str, Any]:
    """The visits to each problem."""
    visited = _visited(rows)
    chosen = spread(visited, _MAX_PROBLEMS)
    of = f" of {len(visited)}" if len(chosen) < len(visited) else ""
    cells = [{"name": f"problem {index}", "visits": spread(v, _MAX_VISITS)} for index, v in chosen]
    return {"title": title, "x": visits, "y": f"{len(chosen)}{of} problems", "cells": cells}


def _visited(rows: Sequence[_Row]) -> list[tuple[int, list[_Visit]]]:
    """The problems that were met at two steps or more, the hardest first."""
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for row in rows:
        for index, correct, size in zip(row["problems"], row["correct"], _sizes(row)):
            # A step may draw a problem more than once.
            right, of = found.setdefault(index, {}).get(row["step"], (0, 0))
            found[index][row["step"]] = (right + correct, of + size)
    again = [
        (index, [(step, right, of) for step, (right, of) in sorted(visits.items())])
        for index, visits in found.items()
        if len(visits) > 1
    ]
    return sorted(again, key=lambda one: (sum(r / of for _, r, of in one[1]) / len(one[1]), one[0]))

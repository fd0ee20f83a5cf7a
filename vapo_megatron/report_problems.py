"""Pass rates of problems over a run: how many are hopeless or mastered, what becomes of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_MAX_POINTS = 100
_MAX_PROBLEMS = 40
_MAX_VISITS = 30

_Row = Mapping[str, Any]
_Visit = tuple[int, int, int]
"""Step, correct responses, responses."""


def problem_plots(rows: Sequence[_Row]) -> Iterable[dict[str, Any]]:
    """Yield the plots of problems.jsonl's rows."""
    if not rows:
        return
    yield {
        "title": "Are there problems left to learn from?",
        "x": "step",
        "y": "share of the problems by right responses",
        "series": [{"label": name, "points": points} for name, points in _shares(rows) if points],
        "low": 0,
        "high": 1,
    }
    visited = _visited(rows)
    if visited:
        yield {
            "title": "Which problems are learnt, and which forgotten?",
            "x": "visit",
            "y": "problem",
            "cells": [{"name": f"problem {index}", "visits": v} for index, v in visited],
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
    """Some of the problems that the run met at two steps or more, the hardest first."""
    found: dict[int, dict[int, tuple[int, int]]] = {}
    for row in rows:
        for index, correct in zip(row["problems"], row["correct"]):
            # A step may draw a problem more than once.
            right, of = found.setdefault(index, {}).get(row["step"], (0, 0))
            found[index][row["step"]] = (right + correct, of + row["group_size"])
    again = [(index, v) for index, v in found.items() if len(v) > 1]
    again.sort(key=lambda item: (sum(c / n for c, n in item[1].values()) / len(item[1]), item[0]))
    if len(again) > _MAX_PROBLEMS:
        last = len(again) - 1
        again = [again[round(i * last / (_MAX_PROBLEMS - 1))] for i in range(_MAX_PROBLEMS)]
    return [
        (index, [(step, c, n) for step, (c, n) in sorted(v.items())][-_MAX_VISITS:])
        for index, v in again
    ]

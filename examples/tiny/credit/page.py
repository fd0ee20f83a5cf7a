"""The credit example's charts, and some responses' advantages, token by token."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from runner.arms import Arm
from runner.curves import COLORS, Curve, Line, Panel, draw
from runner.tables import Runs

from credit import measures
from credit.keys import read_problem
from credit.results import Result
from credit.values import Floats, follow, values
from vapo_megatron.run.directory import read_rows, rollout_file
from vapo_megatron.run.report.html import escape

SHOWN = 3
"""Responses of a prompt."""


def _lines(
    arms: Mapping[str, Arm], runs: Runs, curve: Callable[[Result], Curve | None]
) -> list[Line]:
    """Return a line for each arm, of the curves that its seeds have."""
    found = []
    for i, (name, arm) in enumerate(arms.items()):
        curves = [curve(result) for _, result in sorted(runs.get(name, {}).items())]
        found.append(Line(arm.title, COLORS[i % len(COLORS)], [c for c in curves if c]))
    return found


def lead(arms: Mapping[str, Arm], runs: Runs) -> str:
    """Return the SVG of accuracy by sampled responses alone."""
    title = "responses sampled, those of value pretraining and of dropped groups included"
    lines = _lines(arms, runs, lambda result: result.by_responses)
    return draw([Panel("held-out accuracy", title, lines)], columns=1)


def charts(arms: Mapping[str, Arm], runs: Runs) -> str:
    """Return the SVG of accuracy by step and by responses, and of credit by step."""
    by_responses = "responses, value pretraining included"
    panels = [
        Panel("held-out accuracy", "policy steps", _lines(arms, runs, lambda r: r.by_step)),
        Panel("held-out accuracy", by_responses, _lines(arms, runs, lambda r: r.by_responses)),
    ]
    for title, field, low, high in (
        ("correlation with true advantages, key tokens", "key_correlation", 0.0, 1.0),
        ("size of advantages, filler tokens / key tokens", "noise_ratio", 0.0, 1.5),
        ("share of good keys", "good_keys", 0.5, 1.0),
        ("steps copied right", "copied", 0.9, 1.0),
        ("explained variance", "critic/explained_variance", 0.0, 1.0),
        ("explained variance of the exact values", "best_explained_variance", 0.0, 1.0),
    ):
        lines = _lines(arms, runs, lambda run, field=field: run.of_field(field))
        panels.append(Panel(title, "policy steps", lines, low, high))
    return draw(panels)


def by_lock(arms: Mapping[str, Arm], runs: Runs, first: int, last: int) -> str:
    """Return the SVG of bias and spread of V by lock, means over some steps."""

    def curve(result: Result, field: str) -> Curve:
        found = [each for step, each in result.of_field(field) if first <= step <= last and each]
        means = [statistics.fmean(of_lock) for of_lock in zip(*found)]
        return [(float(i), mean) for i, mean in enumerate(means, 1)]

    panels = []
    for title, field, low, high in (
        (f"V less exact V, steps {first} to {last}", "value_bias_by_lock", -0.5, 0.5),
        ("its standard deviation", "value_spread_by_lock", 0.0, 1.0),
    ):
        lines = _lines(arms, runs, lambda run, field=field: curve(run, field))
        lines = [line for line in lines if line.curves]
        panels.append(Panel(title, "lock", lines, low, high))
    return draw(panels)


def side_by_side(runs: Mapping[str, Path], step: int) -> str:
    """Return HTML of one prompt's responses in several runs, with true and estimated advantages.

    Args:
        runs: run directories by title, of arms that saw the same prompt in this step.
        step: from 1, as in metrics.jsonl.
    """
    columns = []
    for title, run in runs.items():
        file = rollout_file(run, step)
        if not file.exists():
            continue
        (row,) = [row for row in read_rows(run / measures.FILE) if row["step"] == step]
        group = json.loads(file.read_text().splitlines()[0])
        chosen = _chosen(group["responses"])
        chances = np.array(row["chances"])
        shown = [_response(group["prompt"], response, chances) for response in chosen]
        columns.append(f"<div><h3>{escape(title)}, step {step}</h3>{''.join(shown)}</div>")
    return f'<div class="of">{"".join(columns)}</div>'


def _chosen(responses: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return SHOWN responses, correct and wrong ones by turns."""
    right = [r for r in responses if r["status"] == "correct"]
    wrong = [r for r in responses if r["status"] != "correct"]
    mixed = [r for pair in zip(right, wrong) for r in pair]
    return [*mixed, *(r for r in responses if r not in mixed)][:SHOWN]


def _response(prompt: str, response: Mapping[str, Any], chances: Floats) -> str:
    problem, tokens = read_problem(prompt), response["tokens"]
    pieces = tokens["pieces"]
    path = follow(problem, pieces)
    (exact,) = values([problem], [path], chances, [response["reward"]])
    estimated = np.array([a or 0.0 for a in tokens["advantages"]])
    lines = "".join(
        f'<div class="tokens"><b>{name}</b>{_colored(pieces, numbers)}</div>'
        for name, numbers in (("true", np.diff(exact)), ("estimated", estimated))
    )
    opened = f"{path.opened[-1]} of {problem.goal} opened, {escape(response['status'])}"
    return f"<p>{opened}</p>{lines}"


def _colored(pieces: Sequence[str], numbers: Floats) -> str:
    """Color tokens by the sign and size of a number, relative to the largest."""
    largest = float(np.abs(numbers).max()) or 1.0
    parts = []
    for piece, number in zip(pieces, numbers, strict=True):
        share = abs(float(number)) / largest
        color = "16,150,80" if number > 0 else "220,40,40"
        style = f' style="background:rgba({color},{share:.2f})"' if share >= 0.02 else ""
        parts.append(f'<span title="{number:+.3f}"{style}>{escape(piece)}</span>')
    return "".join(parts)

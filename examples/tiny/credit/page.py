"""The credit example's charts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from runner.arms import Arm
from runner.curves import COLORS, Curve, Line, Panel, draw
from runner.tables import Runs

from credit.results import Result


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

"""One self-contained page that lays the curves of several runs over each other.

Runs are told apart by colour and by dashes; tables show final and best values, and the
configuration fields in which the runs differ.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.errors import DataError
from vapo_megatron.metrics import accuracy_name, describe
from vapo_megatron.report_page import escape, script_json, write_page
from vapo_megatron.report_sections import yaml_value
from vapo_megatron.run_directory import Run, read_run

_NUM_COLORS = 6
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "1 4")
"""With 6 colours, 30 runs look different; the first six differ in their colours alone too."""

_ACCURACY = "evaluation/avg@K"

_MEASURES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("Held-out accuracy", _ACCURACY, "high", {"low": 0, "high": 1}),
    ("Training accuracy", "reward/correct_fraction", "high", {"low": 0, "high": 1}),
    ("Reward", "reward/mean", "high", {}),
    ("Response length", "rollout/response_length_mean", "", {"low": 0}),
    ("Entropy", "actor/entropy", "", {"low": 0}),
    ("Explained variance", "critic/explained_variance", "high", {"high": 1, "floor": -1}),
    ("Value loss", "critic/loss", "low", {"low": 0}),
    ("KL from the old policy", "actor/approx_kl", "", {}),
    ("Clip fraction, low", "actor/clip_fraction_low", "", {"low": 0}),
    ("Clip fraction, high", "actor/clip_fraction_high", "", {"low": 0}),
    ("Gradient norm of the actor", "actor/grad_norm", "", {"log": True}),
    ("Lambda of the actor", "algorithm/lambda_actor_mean", "", {"high": 1}),
    ("Tokens per second", "tokens_per_second", "high", {"low": 0}),
)
"""Title, metric, whether high or low is better (empty: neither), and the axis."""


def build_comparison(run_dirs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write a page that compares runs and return its path.

    Args:
        run_dirs: two or more run directories, finished or not.
        out: the page; None: comparison.html in the deepest directory that holds all runs.

    Raises:
        DataError: fewer than two runs, one given twice, or one that is no run directory.
    """
    paths = [Path(run_dir).resolve() for run_dir in run_dirs]
    twice = sorted({str(path) for path in paths if paths.count(path) > 1})
    if twice:
        raise DataError(f"{twice[0]} is given twice; a comparison takes each run once")
    if len(paths) < 2:
        raise DataError(f"a comparison takes two or more runs, found {len(paths)}")
    runs = [read_run(path) for path in paths]
    parent = Path(os.path.commonpath([path.parent for path in paths]))
    names = [str(path.relative_to(parent)) for path in paths]
    slots = {
        "title": f"{len(runs)} runs",
        "subtitle": escape(parent),
        "runs": "".join(_key(i, name, run) for i, (name, run) in enumerate(zip(names, runs))),
        "data": script_json(_chart_data(names, runs)),
        "values": _table(names, _values(runs)),
        "config": _table(names, _differing(runs)) or '<p class="empty">No field differs.</p>',
    }
    return write_page(
        Path(out) if out else parent / "comparison.html", "report_comparison.html", slots
    )


def _look(number: int) -> dict[str, str]:
    """Colour and dashes of a run's curves."""
    return {
        "color": f"var(--series{number % _NUM_COLORS})",
        "dash": _DASHES[number % len(_DASHES)],
    }


def _key(number: int, name: str, run: Run) -> str:
    steps = run.rows[-1]["step"] if run.rows else 0
    look = _look(number)
    line = (
        f'<svg class="dash" width="26" height="10"><path d="M1,5h24" '
        f'style="stroke: {look["color"]}; stroke-dasharray: {look["dash"] or "none"}"/></svg>'
    )
    return f"<li>{line}<b>{escape(name)}</b> {steps} step{'s' * (steps != 1)}</li>"


def _points(run: Run, metric: str) -> list[list[float | None]]:
    """[step, value] where the run has the metric; null where it was not finite."""
    if metric != _ACCURACY:
        return [[row["step"], row[metric]] for row in run.rows if metric in row]
    named = [(row, name) for row in run.rows if (name := accuracy_name(row))]
    return [[row["step"], row[name]] for row, name in named]


def _samples(run: Run, metric: str) -> str:
    """What K is, where the metric has one."""
    found = next((n for row in run.rows if (n := accuracy_name(row))), "")
    return found.removeprefix("evaluation/") if metric == _ACCURACY else ""


def _chart_data(names: Sequence[str], runs: Sequence[Run]) -> dict[str, Any]:
    charts = []
    for title, metric, _, axis in _MEASURES:
        about = describe(metric.replace("@K", "@1"))
        assert about, f"{metric} is in metrics.METRICS"
        series = [
            {
                "label": " ".join(filter(None, (name, _samples(run, metric)))),
                "about": about.description,
                "points": points,
                **_look(number),
            }
            for number, (name, run) in enumerate(zip(names, runs))
            if (points := _points(run, metric))
        ]
        if series:
            charts.append({"title": title, "unit": about.unit, "series": series, **axis})
    pretraining = {
        (run.config.get("algorithm") or {}).get("value_pretraining_steps", 0) for run in runs
    }
    same = pretraining.pop() if len(pretraining) == 1 else 0
    return {"pretraining": same, "charts": charts, "more": [], "phases": []}


def _values(runs: Sequence[Run]) -> Iterable[tuple[str, list[str]]]:
    """Per metric, each run's final value, and its best one with the step where it stood."""
    for title, metric, better, _ in _MEASURES:
        found = [[(s, v) for s, v in _points(run, metric) if v is not None] for run in runs]
        if not any(found):
            continue
        yield f"{title}, final", _marked([p[-1][1] if p else None for p in found], better)
        if better:
            choose = max if better == "high" else min
            best = [choose(p, key=lambda point: point[1]) if p else None for p in found]
            cells = _marked([b[1] if b else None for b in best], better)
            steps = [f" <small>step {b[0]}</small>" if b else "" for b in best]
            yield f"{title}, best", [cell + step for cell, step in zip(cells, steps)]


def _marked(values: Sequence[float | None], better: str) -> list[str]:
    """Cells of a row; the best among the runs stands out."""
    finite = [value for value in values if value is not None]
    best = {"high": max, "low": min}[better](finite) if better and len(finite) > 1 else None
    texts = ["-" if v is None else f"{v:,.0f}" if abs(v) >= 1000 else f"{v:.4g}" for v in values]
    return [
        f"<b>{text}</b>" if best is not None and value == best else text
        for text, value in zip(texts, values)
    ]


def _differing(runs: Sequence[Run]) -> Iterable[tuple[str, list[str]]]:
    """Fields in which the runs differ; logging.run_dir, which always does, is left out."""
    flat = [_flatten(run.config) for run in runs]
    for name in dict.fromkeys(name for fields in flat for name in fields):
        texts = [yaml_value(fields[name]) if name in fields else "-" for fields in flat]
        if len(set(texts)) > 1 and name != "logging.run_dir":
            yield name, [escape(text) for text in texts]


def _flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            fields |= {f"{name}.{field}": inner for field, inner in value.items()}
        else:
            fields[name] = value
    return fields


def _table(names: Sequence[str], rows: Iterable[tuple[str, list[str]]]) -> str:
    """A column a run, in a box that scrolls sideways where the page is narrow."""
    body = "".join(
        f'<tr><th scope="row">{escape(title)}</th>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
        for title, cells in rows
    )
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    if not body:
        return ""
    return (
        f'<div class="compared" tabindex="0"><table><thead><tr><td></td>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )

"""The credit example's page: tables, charts, and some responses' advantages, token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keys_credit
import numpy as np
from ablation_arms import Arm
from credit_plot import COLORS, Line, Panel, draw
from credit_table import Curve, Result, Runs
from keys import read_problem
from keys_values import Floats, follow, values

from vapo_megatron.run.directory import read_rows, rollout_file
from vapo_megatron.run.report.html import escape

SHOWN = 3
"""Responses of a prompt."""
STYLE = """
body { font-family: sans-serif; color: #222; max-width: 1500px; margin: 24px auto; padding: 0 16px }
table { border-collapse: collapse; font-size: 13px; margin: 12px 0 }
th, td { border-bottom: 1px solid #ddd; padding: 4px 10px; text-align: left; vertical-align: top }
.tokens { font: 12px/1.5 monospace; word-break: break-all; margin: 2px 0 2px 70px }
.tokens b { font-weight: normal; float: left; margin-left: -70px; color: #666 }
.of { display: grid; grid-template-columns: 1fr 1fr; gap: 24px }
.note { color: #555; max-width: 900px }
"""


def curves_of_credit(runs: Mapping[int, Result], name: str) -> list[Curve]:
    """Return a field of credit.jsonl by step, a curve per seed; undefined values are left out."""
    return [
        [(row["step"], row[name]) for row in result.credit if row[name] is not None]
        for _, result in sorted(runs.items())
    ]


def lead(arms: Mapping[str, Arm], runs: Runs) -> str:
    """Return the SVG of accuracy by sampled responses alone."""
    lines = [
        Line(arms[name].title, COLORS[i], [r.by_responses for _, r in sorted(runs[name].items())])
        for i, name in enumerate(arms)
    ]
    title = "responses sampled, those of value pretraining and of dropped groups included"
    return draw([Panel("held-out accuracy", title, lines)], columns=1)


def charts(arms: Mapping[str, Arm], runs: Runs) -> str:
    """Return the SVG of accuracy by step and by responses, and of credit by step."""
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(arms)}

    def lines(curves: Any) -> list[Line]:
        found = [(name, curves(runs.get(name, {}))) for name in arms]
        return [Line(arms[name].title, colors[name], [c for c in of if c]) for name, of in found]

    def of_results(field: str) -> Any:
        return lambda found: [getattr(result, field) for _, result in sorted(found.items())]

    panels = [
        Panel("held-out accuracy", "policy steps", lines(of_results("by_step"))),
        Panel(
            "held-out accuracy", "responses, value pretraining included",
            lines(of_results("by_responses")),
        ),
    ]  # fmt: skip
    for title, field, high in (
        ("correlation with true advantages, key tokens", "key_correlation", 1.0),
        ("size of advantages, filler tokens / key tokens", "noise_ratio", 1.5),
        ("share of good keys", "good_keys", 1.0),
        ("steps copied right", "copied", 1.0),
    ):
        low = {"copied": 0.9, "good_keys": 0.5}.get(field, 0.0)
        of_arms = lines(lambda found, field=field: curves_of_credit(found, field))
        panels.append(Panel(title, "policy steps", of_arms, low, high))
    panels.append(
        Panel(
            "explained variance", "policy steps",
            lines(
                lambda found: [
                    [(r["step"], v) for r in result.rows
                     if (v := r.get("critic/explained_variance")) is not None]
                    for _, result in sorted(found.items())
                ]
            ),
        )
    )  # fmt: skip
    best = lines(lambda found: curves_of_credit(found, "best_explained_variance"))
    panels.append(Panel("explained variance of the exact values", "policy steps", best))
    return draw(panels)


def by_lock(arms: Mapping[str, Arm], runs: Runs, first: int, last: int) -> str:
    """Return the SVG of bias and spread of V by lock, means over some steps."""
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(arms)}
    panels = []
    for title, field in (
        (f"V less exact V, steps {first} to {last}", "value_bias_by_lock"),
        ("its standard deviation", "value_spread_by_lock"),
    ):
        lines = []
        for name, arm in arms.items():
            curves = []
            for result in runs.get(name, {}).values():
                found = [r[field] for r in result.credit if first <= r["step"] <= last and r[field]]
                if found:
                    width = min(map(len, found))
                    mean = np.mean([each[:width] for each in found], axis=0)
                    curves.append([(float(i + 1), float(v)) for i, v in enumerate(mean)])
            if curves:
                lines.append(Line(arm.title, colors[name], curves))
        low = -0.5 if "bias" in field else 0.0
        panels.append(Panel(title, "lock", lines, low, 0.5 if low else 1.0))
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
        (row,) = [row for row in read_rows(run / keys_credit.FILE) if row["step"] == step]
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
    rest = [r for r in responses if r not in mixed]
    return [*mixed, *rest][:SHOWN]


def _response(prompt: str, response: Mapping[str, Any], chances: Floats) -> str:
    problem, tokens = read_problem(prompt), response["tokens"]
    pieces = tokens["pieces"]
    path = follow(problem, pieces)
    (exact,) = values([problem], [path], chances, [response["reward"]])
    true = np.diff(exact)
    estimated = np.array([a or 0.0 for a in tokens["advantages"]])
    lines = "".join(
        f'<div class="tokens"><b>{name}</b>{_colored(pieces, numbers)}</div>'
        for name, numbers in (("true", true), ("estimated", estimated))
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


def html_table(markdown: str) -> str:
    """Turn the tables of credit_table into HTML; other lines become paragraphs."""
    parts: list[str] = []
    rows: list[str] = []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            cells = [escape(cell.strip()) for cell in line.strip("|").split("|")]
            if not set(line) <= set("|-"):
                tag = "td" if rows else "th"
                rows.append("<tr>" + "".join(f"<{tag}>{c}</{tag}>" for c in cells) + "</tr>")
            continue
        if rows:
            parts.append(f"<table>{''.join(rows)}</table>")
            rows = []
        if line:
            parts.append(f'<p class="note">{escape(line)}</p>')
    return "".join(parts)


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """Return the page; sections: heading and HTML."""
    body = "".join(f"<h2>{escape(heading)}</h2>\n{content}\n" for heading, content in sections)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>\n<h1>{escape(title)}</h1>\n{body}</html>\n"
    )

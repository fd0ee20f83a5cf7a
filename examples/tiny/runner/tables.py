"""Tables in Markdown and HTML: mean and standard deviation over seeds, and paired differences."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from vapo_megatron.run.report.html import escape

Result = TypeVar("Result")
Seed = TypeVar("Seed")

STYLE = """
body { font-family: sans-serif; color: #222; max-width: 1500px; margin: 24px auto; padding: 0 16px }
table { border-collapse: collapse; font-size: 13px; margin: 12px 0 }
th, td { border-bottom: 1px solid #ddd; padding: 4px 10px; text-align: left; vertical-align: top }
.tokens { font: 12px/1.5 monospace; word-break: break-all; margin: 2px 0 2px 70px }
.tokens b { font-weight: normal; float: left; margin-left: -70px; color: #666 }
.of { display: grid; grid-template-columns: 1fr 1fr; gap: 24px }
.note { color: #555; max-width: 900px }
"""


def spread(values: Sequence[float], form: str) -> str:
    """Return `mean +- standard deviation` over seeds; only the mean for one seed."""
    if not values:
        return "-"
    mean = format(statistics.fmean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} +- {statistics.stdev(values):{form.removeprefix('+')}}"


def measured(
    of_seeds: Mapping[Seed, Result], measure: Callable[[Result], float | None]
) -> dict[Seed, float]:
    """Return the measure of each seed that has one, by seed."""
    found = {seed: measure(result) for seed, result in sorted(of_seeds.items())}  # type: ignore[type-var]
    return {seed: value for seed, value in found.items() if value is not None}


def differences(arm: Mapping[Any, float], first: Mapping[Any, float]) -> list[float]:
    """Return an arm's measure less the first arm's, seed by seed, where both have one.

    The arms of a seed share models and problems.
    """
    return [arm[seed] - first[seed] for seed in arm if seed in first]


def against(arm: Mapping[Any, float], first: Mapping[Any, float], form: str = ".3f") -> str:
    """Return the mean and deviation of `differences`, and in how many seeds the arm is lower."""
    found = differences(arm, first)
    below = sum(difference < 0 for difference in found)
    return f"{spread(found, '+' + form)}, below in {below} of {len(found)}" if found else "-"


def markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def html_table(text: str) -> str:
    """Turn Markdown tables into HTML; other lines become paragraphs."""
    parts: list[str] = []
    rows: list[str] = []
    for line in [*text.splitlines(), ""]:
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
    """Return a page; sections: heading and HTML."""
    body = "".join(f"<h2>{escape(heading)}</h2>\n{content}\n" for heading, content in sections)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>\n<h1>{escape(title)}</h1>\n{body}</html>\n"
    )

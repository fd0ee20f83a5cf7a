"""Tables in Markdown and HTML: mean and standard deviation over seeds, and paired differences."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vapo_megatron.config.metrics import accuracy_name
from vapo_megatron.run.report.html import escape

Runs = Mapping[str, Mapping[int, Any]]
"""A miniature's results of finished runs, by arm and seed."""
Measure = Callable[[Any], "float | None"]
"""Reads a number from a result; None: it has none."""
Cell = Callable[[Runs, str], str]
"""Returns the text of an arm's cell in a column."""
FIRST = "vapo"
"""The arm that others are compared with."""

STYLE = """
body { font-family: sans-serif; color: #222; max-width: 1500px; margin: 24px auto; padding: 0 16px }
table { border-collapse: collapse; font-size: 13px; margin: 12px 0 }
th, td { border-bottom: 1px solid #ddd; padding: 4px 10px; text-align: left; vertical-align: top }
.note { color: #555; max-width: 900px }
"""


def accuracies(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the steps and the held-out accuracies of metrics.jsonl's rows that have one."""
    return [(row["step"], row[name]) for row in rows if (name := accuracy_name(row))]


def spread(values: Sequence[float], form: str) -> str:
    """Return `mean +- standard deviation` over seeds; only the mean for one seed."""
    if not values:
        return "-"
    mean = format(statistics.fmean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} +- {statistics.stdev(values):{form.removeprefix('+')}}"


def measured(runs: Runs, arm: str, measure: Measure) -> dict[int, float]:
    """Return the measure of each of an arm's seeds that has one, by seed."""
    found = {seed: measure(result) for seed, result in sorted(runs.get(arm, {}).items())}
    return {seed: value for seed, value in found.items() if value is not None}


def mean(measure: Measure, form: str = ".3f") -> Cell:
    """Return a column of means and deviations over seeds."""
    return lambda runs, arm: spread(list(measured(runs, arm, measure).values()), form)


def each(measure: Measure, form: str = ".3f", separator: str = " ") -> Cell:
    """Return a column of each seed's number, in the same order for all arms."""

    def cell(runs: Runs, arm: str) -> str:
        own = runs.get(arm, {})
        found = {seed: measure(result) for seed, result in own.items()}
        cells = {s: "never" if v is None else format(v, form) for s, v in found.items()}
        seeds = sorted({seed for of_arm in runs.values() for seed in of_arm})
        return separator.join(cells.get(seed, "-") for seed in seeds) if own else "-"

    return cell


def difference(measure: Measure, form: str = ".3f") -> Cell:
    """Return a column of an arm's numbers less the first arm's, seed by seed, where both have one.

    Mean and deviation, and in how many seeds the arm is lower. The arms of a seed share models and
    problems.
    """

    def cell(runs: Runs, arm: str) -> str:
        if arm == FIRST:
            return ""
        own, first = (measured(runs, name, measure) for name in (arm, FIRST))
        found = [own[seed] - first[seed] for seed in own if seed in first]
        below = sum(less < 0 for less in found)
        return f"{spread(found, '+' + form)}, below in {below} of {len(found)}" if found else "-"

    return cell


def listed(measure: Measure, form: str = ".3f") -> Cell:
    """Return a column of `mean` with `each` in brackets."""
    return lambda runs, arm: f"{mean(measure, form)(runs, arm)} ({each(measure, form)(runs, arm)})"


def compared(measure: Measure, form: str = ".3f") -> Cell:
    """Return a column of `mean` with `difference` in brackets."""

    def cell(runs: Runs, arm: str) -> str:
        less = difference(measure, form)(runs, arm)
        text = mean(measure, form)(runs, arm)
        return text if less in ("", "-") else f"{text} ({less})"

    return cell


def by_step(runs: Runs, points: Callable[[Any], Sequence[tuple[float, float]]]) -> dict[str, Cell]:
    """Return the columns of what evaluations measure: at the steps that all runs have, and last.

    Args:
        runs: at least one.
        points: returns a result's (step, value), in order.
    """
    steps = [{step for step, _ in points(one)} for of in runs.values() for one in of.values()]

    def at(step: float) -> Measure:
        return lambda result: dict(points(result))[step]

    def last(result: Any) -> float:
        return points(result)[-1][1]

    return {
        **{
            f"after {step:g} steps" if step else "before": mean(at(step))
            for step in sorted(set.intersection(*steps))
        },
        "in the end": mean(last),
        "each seed": each(last),
        "less the first arm": difference(last),
    }


def cells(titles: Mapping[str, str], columns: Mapping[str, Cell], runs: Runs) -> list[list[str]]:
    """Return the title and the cells of each arm; titles: by arm, in the order of the rows."""
    return [
        [title, *(cell(runs, arm) for cell in columns.values())] for arm, title in titles.items()
    ]


def of_arms(name: str, titles: Mapping[str, str], columns: Mapping[str, Cell], runs: Runs) -> str:
    """Return a Markdown table of arms; name: of the first column."""
    return markdown([name, *columns], cells(titles, columns, runs))


def of_finished(
    name: str, titles: Mapping[str, str], columns: Mapping[str, Cell], runs: Runs
) -> str:
    """Return `of_arms` of the arms that have runs; empty: none has."""
    known = {arm: title for arm, title in titles.items() if arm in runs}
    return of_arms(name, known, columns, runs) if known else ""


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

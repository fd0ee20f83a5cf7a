"""One self-contained page that lays the curves of several runs over each other.

Runs are told apart by colour and by dashes; tables show final and best values, and the
configuration fields in which the runs differ. Runs that differ in their seed alone may stand
together as an arm: then a curve is the mean of its runs, in a band from the lowest to the highest.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.config.metrics import describe
from vapo_megatron.errors import DataError
from vapo_megatron.run.report.arms import (
    MEASURES,
    Arm,
    curve,
    finite_points,
    mean_and_ends,
    read_arms,
    samples,
)
from vapo_megatron.run.report.html import breakable, escape, script_json, write_page
from vapo_megatron.run.report.sections import yaml_value

_NUM_COLORS = 6
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "1 4")
"""With 6 colours, 30 arms look different; the first six differ in their colours alone too."""


def build_comparison(
    run_dirs: Sequence[str | Path],
    out: str | Path | None = None,
    *,
    by_arm: bool = False,
    lead: str = "",
) -> Path:
    """Write a page that compares runs and return its path.

    Args:
        run_dirs: two or more run directories, finished or not.
        out: the page; None: comparison.html in the deepest directory that holds all runs.
        by_arm: runs whose paths differ in a directory `seed_N` alone are one arm, which is named by
            the rest of the path: ARM/seed_0 and ARM/seed_1, or seed_0/ARM and seed_1/ARM. Arms
            stand in the order in which run_dirs names them first.
        lead: HTML that stands above all else, such as `table` makes; its text is escaped.

    Raises:
        DataError: fewer than two runs, one given twice, or one that is no run directory.
    """
    paths = [Path(run_dir).resolve() for run_dir in run_dirs]
    twice = sorted({str(path) for path in paths if paths.count(path) > 1})
    if twice:
        raise DataError(f"{twice[0]} is given twice; a comparison takes each run once")
    if len(paths) < 2:
        raise DataError(f"a comparison takes two or more runs, found {len(paths)}")
    parent = Path(os.path.commonpath([path.parent for path in paths]))
    arms = read_arms(paths, parent, by_arm)
    names = [arm.name for arm in arms]
    several = len(arms) < len(paths)
    slots = {
        "kind": "Runs compared",
        "title": f"{_count(len(arms), 'arm')}, {len(paths)} runs"
        if several
        else f"{len(paths)} runs",
        "subtitle": escape(parent),
        "lead": lead,
        "arms": "".join(_key(i, arm) for i, arm in enumerate(arms)),
        "how": _MEANS if several else _SINGLE,
        "data": script_json(_chart_data(arms)),
        "values": table(names, _values(arms)),
        "config": table(names, _differing(arms)) or '<p class="empty">No field differs.</p>',
    }
    return write_page(
        Path(out) if out else parent / "comparison.html", "report_comparison.html", slots
    )


_SINGLE = "The last step's value, and the best of any step."
_MEANS = (
    "Mean over an arm's runs of each one's last value, and of each one's best; below it the lowest "
    "and the highest of them. Curves: the mean where all runs of the arm have a value, in a band "
    "from the lowest to the highest."
)


def table(names: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return a table with a column for each name, in a box that scrolls where the page is narrow.

    Args:
        names: text.
        rows: of each its title, text, and its cells, HTML; none at all: nothing is returned.
    """
    body = "".join(
        f'<tr><th scope="row">{breakable(title)}</th>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
        for title, cells in rows
    )
    heads = "".join(f'<th scope="col">{breakable(name)}</th>' for name in names)
    if not body:
        return ""
    return (
        f'<div class="compared" tabindex="0"><table><thead><tr><td></td>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _look(number: int) -> dict[str, str]:
    """Colour and dashes of an arm's curves."""
    return {
        "color": f"var(--series{number % _NUM_COLORS})",
        "dash": _DASHES[number % len(_DASHES)],
    }


def _key(number: int, arm: Arm) -> str:
    """A button that picks the arm's curves."""
    done = [run.rows[-1]["step"] if run.rows else 0 for run in arm.runs]
    alike = min(done) == max(done)
    steps = _count(done[0], "step") if alike else f"{min(done)} to {max(done)} steps"
    count = f"{len(done)} runs, " if len(done) > 1 else ""
    look = _look(number)
    line = (
        f'<svg class="dash" width="26" height="10"><path d="M1,5h24" '
        f'style="stroke: {look["color"]}; stroke-dasharray: {look["dash"] or "none"}"/></svg>'
    )
    return (
        f'<button type="button" data-arm="{number}" aria-pressed="false">{line}'
        f"<b>{escape(arm.name)}</b> {count}{steps}</button>"
    )


def _chart_data(arms: Sequence[Arm]) -> dict[str, Any]:
    charts = []
    for title, metric, _, axis in MEASURES:
        about = describe(metric.replace("@K", "@1"))
        assert about, f"{metric} is in config/metrics.py"
        series = [
            {
                "label": " ".join(filter(None, (arm.name, samples(arm, metric)))),
                "about": about.description,
                "arm": number,
                "points": found,
                **_look(number),
            }
            for number, arm in enumerate(arms)
            if (found := curve(arm, metric))
        ]
        if series:
            charts.append({"title": title, "unit": about.unit, "series": series, **axis})
    pretraining = {
        run.section("algorithm").get("value_pretraining_steps", 0)
        for arm in arms
        for run in arm.runs
    }
    same = pretraining.pop() if len(pretraining) == 1 else 0
    steps = sorted({row["step"] for arm in arms for run in arm.runs for row in run.rows})
    return {"pretraining": same, "steps": steps, "charts": charts, "more": [], "phases": None}


def _values(arms: Sequence[Arm]) -> Iterable[tuple[str, list[str]]]:
    """Per metric, each arm's final value, and its best one; of one run with the step of that."""
    for title, metric, better, _ in MEASURES:
        found = [finite_points(arm, metric) for arm in arms]
        if not any(found):
            continue
        last = [[run[-1] for run in of_arm] for of_arm in found]
        yield f"{title}, final", _cells(last, better, with_step=False)
        if better:
            choose = max if better == "high" else min
            best = [[choose(run, key=lambda p: p[1]) for run in of_arm] for of_arm in found]
            yield f"{title}, best", _cells(best, better, with_step=True)


def _cells(
    points: Sequence[Sequence[tuple[int, float]]], better: str, with_step: bool
) -> list[str]:
    """Cells of a row, from each run's (step, value); the best mean stands out."""
    ends = [mean_and_ends([v for _, v in of_arm]) if of_arm else None for of_arm in points]
    means = [e[0] for e in ends if e]
    best = {"high": max, "low": min}[better](means) if better and len(means) > 1 else None
    cells = []
    for of_arm, e in zip(points, ends):
        if e is None:
            cells.append("-")
            continue
        text = _number(e[0])
        cell = f"<b>{text}</b>" if e[0] == best else text
        if len(of_arm) > 1:
            cell += f" <small>{_number(e[1], 3)} to {_number(e[2], 3)}</small>"
        elif with_step:
            cell += f" <small>step {of_arm[0][0]}</small>"
        cells.append(cell)
    return cells


def _number(value: float, digits: int = 4) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def _differing(arms: Sequence[Arm]) -> Iterable[tuple[str, list[str]]]:
    """Fields in which the arms differ; logging.run_dir, which always does, is left out.

    What fewer arms have than another value stands out; what differs among an arm's own runs, as the
    seed does, is no difference of the arms where each has the same values.
    """
    flat = [[flatten(run.config) for run in arm.runs] for arm in arms]
    names = dict.fromkeys(name for of_arm in flat for fields in of_arm for name in fields)
    for name in names:
        texts = [
            " ".join(dict.fromkeys(yaml_value(f[name]) if name in f else "-" for f in of_arm))
            for of_arm in flat
        ]
        if len(set(texts)) == 1 or name == "logging.run_dir":
            continue
        counts = Counter(texts)
        most = max(counts.values())
        yield (
            name,
            [f"<b>{escape(text)}</b>" if counts[text] < most else escape(text) for text in texts],
        )


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return every field as section.field: value."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            fields |= {f"{name}.{field}": inner for field, inner in value.items()}
        else:
            fields[name] = value
    return fields

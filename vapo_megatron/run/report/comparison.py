"""comparison.html: one self-contained page with the curves of several runs in the same charts.

Tables show final and best values, and the configuration fields in which the runs differ. Runs that
differ only in their seed may form an arm: its curve is their mean, in a band from the lowest to the
highest.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.config.metrics import describe
from vapo_megatron.errors import DataError
from vapo_megatron.run.report.arms import MEASURES, Arm, mean_and_ends, read_arms
from vapo_megatron.run.report.html import (
    breakable,
    escape,
    script_json,
    write_page,
    yaml_value,
)

_NUM_COLORS = 6
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "1 4")
"""With 6 colours, 30 arms look different; the first six also differ in colour alone."""


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
        by_arm: see read_arms: ARM/seed_0 and ARM/seed_1, or seed_0/ARM and seed_1/ARM.
        lead: HTML for the top of the page, such as `table` makes; its text is escaped.

    Raises:
        DataError: fewer than two runs, one given twice, or one that is no run directory.
    """
    paths = [Path(run_dir).resolve() for run_dir in run_dirs]
    if len(set(paths)) < len(paths):
        twice = min(path for path in paths if paths.count(path) > 1)
        raise DataError(f"{twice} is given twice; a comparison takes each run once")
    if len(paths) < 2:
        raise DataError(f"a comparison takes two or more runs, found {len(paths)}")
    parent = Path(os.path.commonpath([path.parent for path in paths]))
    arms = read_arms(paths, parent, by_arm)
    names = [arm.name for arm in arms]
    title, how = f"{len(paths)} runs", "The last step's value, and the best of any step."
    if len(arms) < len(paths):
        title, how = f"{_count(len(arms), 'arm')}, {title}", _MEANS
    slots = {
        "kind": "Runs compared",
        "title": title,
        "subtitle": escape(parent),
        "lead": lead,
        "arms": "".join(_key(i, arm) for i, arm in enumerate(arms)),
        "how": how,
        "data": script_json(_chart_data(arms)),
        "values": table(names, _values(arms)),
        "config": table(names, _differing(arms)) or '<p class="empty">No field differs.</p>',
    }
    page = Path(out) if out else parent / "comparison.html"
    return write_page(page, "report_comparison.html", slots)


_MEANS = (
    "The mean over an arm's runs of their last values, or of their best; below it the lowest and "
    "the highest. Curves: the mean at the steps where all runs of the arm have a value, in a band "
    "from the lowest to the highest."
)


def table(names: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return a table with a column for each name, in a box that scrolls where the page is narrow.

    Args:
        names: text.
        rows: title (text) and cells (HTML); without rows nothing is returned.
    """
    body = ""
    for title, cells in rows:
        values = "".join(f"<td>{cell}</td>" for cell in cells)
        body += f'<tr><th scope="row">{breakable(title)}</th>{values}</tr>'
    heads = "".join(f'<th scope="col">{breakable(name)}</th>' for name in names)
    if not body:
        return ""
    return (
        f'<div class="compared" tabindex="0"><table><thead><tr><td></td>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def look(number: int) -> dict[str, str]:
    """Return the colour and the dashes of the curves of what has this number."""
    color = f"var(--series{number % _NUM_COLORS})"
    return {"color": color, "dash": _DASHES[number % len(_DASHES)]}


def _key(number: int, arm: Arm) -> str:
    """Return a button that picks the arm's curves."""
    done = [run.rows[-1]["step"] if run.rows else 0 for run in arm.runs]
    alike = min(done) == max(done)
    steps = _count(done[0], "step") if alike else f"{min(done)} to {max(done)} steps"
    count = f"{len(done)} runs, " if len(done) > 1 else ""
    drawn = look(number)
    line = (
        f'<svg class="dash" width="26" height="10"><path d="M1,5h24" '
        f'style="stroke: {drawn["color"]}; stroke-dasharray: {drawn["dash"] or "none"}"/></svg>'
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
                "label": arm.label(metric),
                "about": about.description,
                "arm": number,
                "points": found,
                **look(number),
            }
            for number, arm in enumerate(arms)
            if (found := arm.curve(metric))
        ]
        if series:
            charts.append({"title": title, "unit": about.unit, "series": series, **axis})
    runs = [run for arm in arms for run in arm.runs]
    pretraining = {run.section("algorithm").get("value_pretraining_steps", 0) for run in runs}
    same = pretraining.pop() if len(pretraining) == 1 else 0
    steps = sorted({row["step"] for run in runs for row in run.rows})
    return {"pretraining": same, "steps": steps, "charts": charts, "more": [], "phases": None}


def _values(arms: Sequence[Arm]) -> Iterable[tuple[str, list[str]]]:
    """Yield each metric's final values, and its best ones; that of one run with its step."""
    for title, metric, better, _ in MEASURES:
        found = [arm.finite_points(metric) for arm in arms]
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
    """Return a row's cells from each run's (step, value); the best mean is bold."""
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
    """Yield the fields in which the arms differ, except logging.run_dir, which always does.

    All but the most common values are bold. What differs only within arms, as the seed does, counts
    only if the arms have different values.
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
        rare = {text for text, count in counts.items() if count < max(counts.values())}
        yield name, [f"<b>{escape(t)}</b>" if t in rare else escape(t) for t in texts]


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return every field as section.field: value."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            fields |= {f"{name}.{field}": inner for field, inner in value.items()}
        else:
            fields[name] = value
    return fields

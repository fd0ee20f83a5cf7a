"""How far the results on locks and keys depend on settings: sweeps as data, their table and charts.

Each value of a setting is a run of its own, compared after STEP policy steps. The value that the
form's configuration has is that of the main arms' runs, which are longer but the same up to there.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence

from runner.arms import Arm
from runner.curves import COLORS, Line, Panel, at, draw
from runner.tables import Runs, markdown, measured, spread

from credit.arms import MAIN, TABLES

STEP = 20
"""Policy steps after which runs are compared."""
ACTOR_RATE, CRITIC_RATE = 2.5e-4, 5e-4
"""Of keys_tiny.yaml and tiny.yaml."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A setting and its values."""

    title: str
    values: Mapping[str, tuple[str, ...]]
    """Overrides by label, in the axis' order; none: the value of the form's configuration."""
    lines: Sequence[tuple[str, str]]
    """(form, arm)"""


def _rates(factor: float) -> tuple[str, ...]:
    return (
        f"optimizer.actor_learning_rate={ACTOR_RATE * factor:g}",
        f"optimizer.critic_learning_rate={CRITIC_RATE * factor:g}",
    )


def _values(field: str, labels: str, own: str) -> dict[str, tuple[str, ...]]:
    """Return a field's values, of which `own` is the configuration's."""
    return {label: () if label == own else (f"{field}={label}",) for label in labels.split()}


ON_KEYS = tuple(("keys", arm) for arm in MAIN)
SWEEPS = {
    "rates": Sweep(
        "both learning rates, times",
        {"0.5": _rates(0.5), "1": (), "2": _rates(2), "4": _rates(4)},
        ON_KEYS,
    ),
    "group": Sweep(
        "responses per prompt, of 64 a step",
        _values("algorithm.group_size", "2 4 8 16", "8"),
        ON_KEYS,
    ),
    "mini_batch": Sweep(
        "responses per mini-batch, of 64 a step",
        _values("algorithm.mini_batch_size", "4 8 16 32", "16"),
        ON_KEYS,
    ),
    "alpha": Sweep(
        "alpha of the length-adaptive lambda",
        _values("algorithm.length_adaptive_alpha", "0.05 0.15 0.5 1.5", "0.05"),
        (("keys", "vapo"), ("keys_mixed", "vapo")),
    ),
    "imitation": Sweep(
        "weight in the positive-example loss: none, 1, or SIL's (R - V)+",
        {
            "none": ("algorithm.positive_lm_coef=0",),
            "1": (),
            "SIL": ("algorithm.positive_lm_weight=advantage",),
        },
        (("keys", "vapo"),),
    ),
}
"""By the name in directories."""


def run_name(arm: str, sweep: str, label: str) -> str:
    """Return the name of the run of a swept value; that of the arm for the form's own value."""
    return f"{arm}.{sweep}.{label}" if SWEEPS[sweep].values[label] else arm


def swept_arms() -> dict[str, dict[str, Arm]]:
    """Return the arms of each form that sweeps compare, and what they change of them."""
    found: dict[str, dict[str, Arm]] = {}
    for key, sweep in SWEEPS.items():
        for form, name in sweep.lines:
            arms = TABLES[form].arms
            of_form = found.setdefault(form, {n: arms[n] for n in MAIN if n in arms})
            for label, changes in sweep.values.items():
                if changes:
                    of_form[run_name(name, key, label)] = dataclasses.replace(
                        arms[name],
                        title=f"{arms[name].title}, {sweep.title} {label}",
                        changes=(*arms[name].changes, *changes),
                        policy_steps=None,
                        evaluated_every=None,
                    )
    return found


Found = Mapping[str, Runs]
"""Finished runs by form, name and seed."""


def accuracies(found: Found, form: str, name: str) -> dict[int, float]:
    """Return each seed's held-out accuracy after STEP steps."""
    return measured(found.get(form, {}), name, lambda result: at(result.by_step, STEP))


def by_value(found: Found, key: str, form: str, arm: str) -> tuple[dict[str, list[float]], str]:
    """Return an arm's accuracies at each value of a sweep, and the value with the best mean."""
    known = {
        label: list(accuracies(found, form, run_name(arm, key, label)).values())
        for label in SWEEPS[key].values
    }
    means = {label: statistics.fmean(values) for label, values in known.items() if values}
    return known, max(means, key=means.__getitem__, default=next(iter(known)))


def _lines(sweep: str) -> Iterator[tuple[str, str, str]]:
    """Yield form, arm and title of a sweep's lines."""
    lines = SWEEPS[sweep].lines
    several = len({form for form, _ in lines}) > 1
    for form, arm in lines:
        title = TABLES[form].arms[arm].title
        yield form, arm, f"{title}, {form}" if several and form != "keys" else title


def charts(found: Found) -> str:
    """Return small multiples as an SVG: a panel per sweep, a line per arm, a band over seeds."""
    panels, colors = [], {}
    for key, sweep in SWEEPS.items():
        lines = []
        for form, arm, title in _lines(key):
            curves: dict[int, list[tuple[float, float]]] = {}
            for i, label in enumerate(sweep.values):
                for seed, value in accuracies(found, form, run_name(arm, key, label)).items():
                    curves.setdefault(seed, []).append((float(i), value))
            color = colors.setdefault(title, COLORS[len(colors) % len(COLORS)])
            lines.append(Line(title, color, list(curves.values())))
        ticks = [(float(i), label) for i, label in enumerate(sweep.values)]
        panels.append(Panel(f"accuracy after {STEP} steps", sweep.title, lines, ticks=ticks))
    return draw(panels)


def table(found: Found) -> str:
    """Return a table: a row per sweep and arm, a column per value; in bold the best."""
    width = max(len(sweep.values) for sweep in SWEEPS.values())
    rows = []
    for key, sweep in SWEEPS.items():
        for form, arm, title in _lines(key):
            known, best = by_value(found, key, form, arm)
            cells = []
            for label, values in known.items():
                cell = f"{label}: {spread(values, '.3f')}"
                cells.append(f"**{cell}**" if label == best and values else cell)
            rows.append([sweep.title, title, *cells, *[""] * (width - len(cells))])
    names = ["setting", "arm", *[f"value {i}" for i in range(1, width + 1)]]
    return markdown(names, rows)


def best_against_best(found: Found) -> str:
    """Return a table: each arm at its own best value, chosen by the mean over seeds.

    A choice among several values of what is compared flatters every arm, alike.
    """
    rows = []
    for key in [key for key, sweep in SWEEPS.items() if sweep.lines == ON_KEYS]:
        cells = []
        for form, arm, _ in _lines(key):
            known, best = by_value(found, key, form, arm)
            cells.append(f"{spread(known[best], '.3f')} at {best}" if known[best] else "-")
        rows.append([SWEEPS[key].title, *cells])
    return markdown(["setting", *(TABLES["keys"].arms[arm].title for arm in MAIN)], rows)

"""The ablation's table: mean and spread over seeds, beside the paper's column."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ablation_arms import Arm

from vapo_megatron.metrics import accuracy_name

THRESHOLD = 0.5
"""Held-out accuracy that `steps_to_threshold` waits for."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished run in numbers."""

    first: float
    """Held-out accuracy before training."""
    final: float
    best: float
    best_step: int
    length: float
    """Mean tokens of a held-out response after the last step."""
    entropy: float
    """Nats a token, of the policy that sampled the last step."""
    steps_to_threshold: float | None
    """Step at which held-out accuracy reaches THRESHOLD, on a straight line between two
    evaluations; None: never."""


def result(rows: Sequence[Mapping[str, Any]]) -> Result:
    """Return the numbers of a run's rows; the last row holds an evaluation."""
    evaluated = [(row[name], row["step"]) for row in rows if (name := accuracy_name(row))]
    best, best_step = max(evaluated, key=lambda pair: (pair[0], -pair[1]))
    return Result(
        first=evaluated[0][0],
        final=evaluated[-1][0],
        best=best,
        best_step=best_step,
        length=rows[-1]["evaluation/response_length_mean"],
        entropy=rows[-1]["actor/entropy"],
        steps_to_threshold=_crossing(evaluated),
    )


def _crossing(evaluated: Sequence[tuple[float, int]]) -> float | None:
    before, before_step = evaluated[0]
    for value, step in evaluated:
        if value >= THRESHOLD:
            share = (THRESHOLD - before) / (value - before) if value > before else 0.0
            return before_step + max(0.0, share) * (step - before_step)
        before, before_step = value, step
    return None


def spread(values: Sequence[float], form: str) -> str:
    """Return `mean +- standard deviation` over seeds, the mean alone of one."""
    if not values:
        return "-"
    mean = format(statistics.fmean(values), form)
    return f"{mean} +- {statistics.stdev(values):{form}}" if len(values) > 1 else mean


def against(arm: Sequence[float], vapo: Sequence[float]) -> str:
    """Compare final accuracies: the difference of the means, and whether the seeds overlap."""
    if not arm or not vapo:
        return "-"
    difference = f"{statistics.fmean(arm) - statistics.fmean(vapo):+.3f}"
    if len(arm) < 2 or len(vapo) < 2:
        return difference
    if max(arm) < min(vapo):
        return f"{difference}, below"
    return f"{difference}, above" if min(arm) > max(vapo) else f"{difference}, within the spread"


COLUMNS = (
    "final accuracy", "each seed", "against VAPO", "best accuracy", "at step", "response length",
    "entropy", f"steps to {THRESHOLD}", "paper",
)  # fmt: skip

Row = tuple[str, Sequence[str]]
"""An arm's title and its cells under COLUMNS."""


def rows(arms: Mapping[str, Arm], results: Mapping[str, Sequence[Result]]) -> list[Row]:
    """Return the table's rows, of plain text.

    Args:
        arms: by name, in the order of the rows.
        results: of each arm's finished seeds.
    """
    vapo = [r.final for r in results.get("vapo", ())]
    return [
        (f"{arm.title} ({n})", _cells(arm, results.get(n, ()), vapo)) for n, arm in arms.items()
    ]


def _cells(arm: Arm, found: Sequence[Result], vapo: Sequence[float]) -> tuple[str, ...]:
    final = [r.final for r in found]
    return (
        spread(final, ".3f"),
        " ".join(f"{value:.3f}" for value in final) or "-",
        "" if final == vapo else against(final, vapo),
        spread([r.best for r in found], ".3f"),
        ", ".join(str(r.best_step) for r in found) or "-",
        spread([r.length for r in found], ".0f"),
        spread([r.entropy for r in found], ".3f"),
        ", ".join(_steps(r.steps_to_threshold) for r in found) or "-",
        arm.paper,
    )


def _steps(found: float | None) -> str:
    return "never" if found is None else f"{found:.1f}"


def markdown(of_arms: Sequence[Row], notes: Sequence[str]) -> str:
    """Return rows as a table in Markdown, with paragraphs under it."""
    lines = ["| arm | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (1 + len(COLUMNS))]
    lines += ["| " + " | ".join((title, *cells)) + " |" for title, cells in of_arms]
    return "\n".join(lines) + "\n" + "".join(f"\n{note}\n" for note in notes)

"""The ablation's table: mean and standard deviation over seeds, next to the paper's results."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ablation_arms import Arm

from vapo_megatron.config.metrics import accuracy_name

THRESHOLD = 0.5
"""Held-out accuracy for `steps_to_threshold`."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Summary of a finished run."""

    first: float
    """Held-out accuracy before training."""
    final: float
    best: float
    best_step: int
    length: float
    """Mean response length on held-out problems after the last step, in tokens."""
    entropy: float
    """Nats per token, of the policy before the last step."""
    responses_per_second: float | None
    """Median over steps, evaluations and checkpoints left out; None: no step was timed."""
    steps_to_threshold: float | None
    """Step at which held-out accuracy reaches THRESHOLD, interpolated linearly between evaluations;
    None: never."""


def result(rows: Sequence[Mapping[str, Any]]) -> Result:
    """Summarise a run's rows; the last one must have an evaluation."""
    evaluated = [(row[name], row["step"]) for row in rows if (name := accuracy_name(row))]
    best, best_step = max(evaluated, key=lambda pair: (pair[0], -pair[1]))
    return Result(
        first=evaluated[0][0],
        final=evaluated[-1][0],
        best=best,
        best_step=best_step,
        length=rows[-1]["evaluation/response_length_mean"],
        entropy=rows[-1]["actor/entropy"],
        responses_per_second=_responses_per_second(rows),
        steps_to_threshold=_crossing(evaluated),
    )


def _responses_per_second(rows: Sequence[Mapping[str, Any]]) -> float | None:
    found = [
        row["tokens_per_second"] / row["rollout/response_length_mean"]
        for row in rows if row.get("tokens_per_second")
    ]  # fmt: skip
    return statistics.median(found) if found else None


def _crossing(evaluated: Sequence[tuple[float, int]]) -> float | None:
    before, before_step = evaluated[0]
    for value, step in evaluated:
        if value >= THRESHOLD:
            share = (THRESHOLD - before) / (value - before) if value > before else 0.0
            return before_step + max(0.0, share) * (step - before_step)
        before, before_step = value, step
    return None


def spread(values: Sequence[float], form: str) -> str:
    """Return `mean +- standard deviation` over seeds; only the mean for one seed."""
    if not values:
        return "-"
    mean = format(statistics.fmean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} +- {statistics.stdev(values):{form.removeprefix('+')}}"


def against(arm: Mapping[str, float], vapo: Mapping[str, float]) -> str:
    """Compare final accuracies seed by seed; arms of a seed share models and problems.

    Returns:
        Mean and standard deviation of the difference over common seeds, and in how many of them
        the arm is lower.
    """
    differences = [arm[seed] - vapo[seed] for seed in arm if seed in vapo]
    if not differences:
        return "-"
    below = sum(difference < 0 for difference in differences)
    return f"{spread(differences, '+.3f')}, below in {below} of {len(differences)}"


COLUMNS = (
    "final accuracy", "each seed", "against vapo", "best accuracy", "at step", "response length",
    "entropy", f"steps to {THRESHOLD}", "responses per second", "paper",
)  # fmt: skip

Row = tuple[str, Sequence[str]]
"""An arm's title and its cells under COLUMNS."""


def rows(arms: Mapping[str, Arm], results: Mapping[str, Mapping[str, Result]]) -> list[Row]:
    """Return the table's rows as plain text.

    Args:
        arms: by name, in the order of the rows.
        results: of each arm's finished runs, by seed.
    """
    finals = {n: {seed: r.final for seed, r in found.items()} for n, found in results.items()}
    vapo = finals.get("vapo", {})
    names = {seed for found in results.values() for seed in found}
    seeds = sorted(names, key=lambda seed: (len(seed), seed))
    return [
        (
            f"{arm.title} ({n})",
            _cells(
                arm,
                [results.get(n, {}).get(seed) for seed in seeds],
                "" if n == "vapo" else against(finals.get(n, {}), vapo),
            ),
        )
        for n, arm in arms.items()
    ]


def _cells(arm: Arm, of_seeds: Sequence[Result | None], against_vapo: str) -> tuple[str, ...]:
    """of_seeds: one entry per seed, in the same order for all arms; None: no finished run."""
    found = [r for r in of_seeds if r]

    def each(separator: str, show: Callable[[Result], str]) -> str:
        return separator.join(show(r) if r else "-" for r in of_seeds) if found else "-"

    return (
        spread([r.final for r in found], ".3f"),
        each(" ", lambda r: f"{r.final:.3f}"),
        against_vapo,
        spread([r.best for r in found], ".3f"),
        each(", ", lambda r: str(r.best_step)),
        spread([r.length for r in found], ".0f"),
        spread([r.entropy for r in found], ".3f"),
        each(", ", lambda r: _steps(r.steps_to_threshold)),
        spread([r.responses_per_second for r in found if r.responses_per_second], ".1f"),
        arm.paper,
    )


def _steps(found: float | None) -> str:
    return "never" if found is None else f"{found:.1f}"


def markdown(of_arms: Sequence[Row], notes: Sequence[str]) -> str:
    """Return the rows as a Markdown table, followed by the notes."""
    lines = ["| arm | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (1 + len(COLUMNS))]
    lines += ["| " + " | ".join((title, *cells)) + " |" for title, cells in of_arms]
    return "\n".join(lines) + "\n" + "".join(f"\n{note}\n" for note in notes)

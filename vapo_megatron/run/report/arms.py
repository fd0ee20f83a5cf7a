"""What a comparison lays side by side: one run, or the runs of several seeds as one arm."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.config.metrics import accuracy_name
from vapo_megatron.run.directory import Run, read_run

Point = tuple[int, float | None]
Band = tuple[int, float | None, float | None, float | None]

ACCURACY = "evaluation/avg@K"

MEASURES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("Held-out accuracy", ACCURACY, "high", {"low": 0, "high": 1}),
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

_SEED = re.compile(r"seed_\d+")


@dataclasses.dataclass(frozen=True)
class Arm:
    """What is compared: one run, or several that differ in their seed alone."""

    name: str
    runs: Sequence[Run]


def read_arms(paths: Sequence[Path], parent: Path, by_arm: bool) -> list[Arm]:
    """Read runs, each an arm of its own or together with those of other seeds.

    Args:
        paths: run directories, absolute.
        parent: holds them all.
        by_arm: paths that differ in a directory `seed_N` alone are one arm, named by the rest.

    Returns:
        In the order in which paths name them first.
    """
    found: dict[str, list[Run]] = {}
    for path in paths:
        parts = path.relative_to(parent).parts
        kept = [part for part in parts if not (by_arm and _SEED.fullmatch(part))]
        found.setdefault("/".join(kept) or parent.name, []).append(read_run(path))
    return [Arm(name, runs) for name, runs in found.items()]


def points(run: Run, metric: str) -> list[Point]:
    """(step, value) where the run has the metric; None where it was not finite."""
    if metric != ACCURACY:
        return [(row["step"], row[metric]) for row in run.rows if metric in row]
    named = [(row, name) for row in run.rows if (name := accuracy_name(row))]
    return [(row["step"], row[name]) for row, name in named]


def curve(arm: Arm, metric: str) -> Sequence[Point | Band]:
    """As points; of several runs (step, mean, lowest, highest) at the steps that all have.

    A run that has the metric at no step does not count; None: not finite in one of them.
    """
    of_run = [dict(p) for run in arm.runs if (p := points(run, metric))]
    if len(of_run) < 2:
        return [point for values in of_run for point in values.items()]
    merged: list[Band] = []
    for step in of_run[0]:
        if all(step in values for values in of_run):
            found = [values[step] for values in of_run]
            finite = [value for value in found if value is not None]
            whole = len(finite) == len(found)
            merged.append((step, *(mean_and_ends(finite) if whole else (None, None, None))))
    return merged


def finite_points(arm: Arm, metric: str) -> list[list[tuple[int, float]]]:
    """(step, value) of each of the arm's runs that has some."""
    of_run = [[(s, v) for s, v in points(run, metric) if v is not None] for run in arm.runs]
    return [found for found in of_run if found]


def mean_and_ends(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, lowest, highest."""
    return sum(values) / len(values), min(values), max(values)


def samples(arm: Arm, metric: str) -> str:
    """What K is, where the metric has one."""
    rows = (row for run in arm.runs for row in run.rows)
    found = next((name for row in rows if (name := accuracy_name(row))), "")
    return found.removeprefix("evaluation/") if metric == ACCURACY else ""

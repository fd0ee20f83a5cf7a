"""Arms of a comparison: single runs, or the runs of several seeds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vapo_megatron.config.metrics import accuracy_name
from vapo_megatron.run.directory import Run, read_run

ACCURACY = "evaluation/avg@K"

MEASURES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("Held-out accuracy", ACCURACY, "high", {"low": 0, "high": 1}),
    ("Training accuracy", "reward/correct_fraction", "high", {"low": 0, "high": 1}),
    ("Reward", "reward/mean", "high", {}),
    ("Held-out NLL", "evaluation/nll_mean", "low", {"low": 0}),
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


class Arm(NamedTuple):
    """What is compared: one run, or several that differ only in their seed."""

    name: str
    runs: Sequence[Run]

    def points(self, metric: str) -> list[list[tuple[int, float | None]]]:
        """Return (step, value) of each run that has the metric; None: not finite."""
        found = []
        for run in self.runs:
            names = [accuracy_name(row) if metric == ACCURACY else metric for row in run.rows]
            found.append([(r["step"], r[n]) for r, n in zip(run.rows, names) if n and n in r])
        return [of_run for of_run in found if of_run]

    def curve(self, metric: str) -> Sequence[tuple[int | float | None, ...]]:
        """Return points; of several runs (step, mean, lowest, highest) where all have the metric.

        A run without the metric does not count; None: not finite in one of them.
        """
        of_run = [dict(found) for found in self.points(metric)]
        if len(of_run) < 2:
            return [point for values in of_run for point in values.items()]
        merged: list[tuple[int | float | None, ...]] = []
        for step in of_run[0]:
            if all(step in values for values in of_run):
                finite = [v for values in of_run if (v := values[step]) is not None]
                is_complete = len(finite) == len(of_run)
                merged.append(
                    (step, *(mean_and_ends(finite) if is_complete else (None, None, None)))
                )
        return merged

    def finite_points(self, metric: str) -> list[list[tuple[int, float]]]:
        """Return the finite points of each run that has some."""
        of_run = [[(s, v) for s, v in found if v is not None] for found in self.points(metric)]
        return [found for found in of_run if found]

    def label(self, metric: str) -> str:
        """Return the name of the metric's curve; that of an accuracy tells K."""
        rows = (row for run in self.runs for row in run.rows)
        found = next((name for row in rows if (name := accuracy_name(row))), "")
        samples = found.removeprefix("evaluation/") if metric == ACCURACY else ""
        return f"{self.name} {samples}".strip()


def read_arms(paths: Sequence[Path], parent: Path, by_arm: bool) -> list[Arm]:
    """Read run directories in `parent`, in the order in which paths name their arms first.

    Args:
        paths: absolute.
        parent: holds them all.
        by_arm: paths that differ only in a directory `seed_N` are one arm, named by the rest.
    """
    found: dict[str, list[Run]] = {}
    for path in paths:
        parts = path.relative_to(parent).parts
        kept = [part for part in parts if not (by_arm and re.fullmatch(r"seed_\d+", part))]
        found.setdefault("/".join(kept) or parent.name, []).append(read_run(path))
    return [Arm(name, runs) for name, runs in found.items()]


def mean_and_ends(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean, the lowest and the highest."""
    return sum(values) / len(values), min(values), max(values)

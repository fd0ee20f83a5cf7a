"""Does a model notice an error in the chain of thought before it? Five metrics (arXiv 2504.04022).

Of each sample, c says whether its final answer is right, and e whether its text reflects on the
error explicitly:

    accuracy = mean c    reflection = mean e    correlation = phi(c, e), Pearson's of the two
    accurate_explicit = mean c e    accurate_implicit = mean c (1 - e)

Every mean is one over problems of each problem's mean over samples, as in statistics.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vapo_megatron.rollout.evaluation.statistics import (
    Estimate,
    as_json,
    estimates,
    means,
    resampled_means,
)

CORRELATION = "correlation"


class Sample(NamedTuple):
    """A judged continuation of a prefix."""

    is_correct: bool
    """c."""
    reflects: bool | None
    """e; None: whoever judged it said neither."""


class Reflection(NamedTuple):
    """The metrics of some problems."""

    num_problems: int
    """With a sample that counts."""
    num_samples: int
    """That count: the judge said whether they reflect."""
    num_unclear: int
    """Samples of which it did not; they are in none of the metrics."""
    metrics: dict[str, Estimate | None]
    """accuracy, reflection, accurate_explicit, accurate_implicit, correlation. None: it has no
    value, as without a sample that counts, and the correlation where all c or all e are equal."""

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        known = {name: value for name, value in self.metrics.items() if value is not None}
        values = as_json(known)
        metrics = {name: values.get(name) for name in self.metrics}
        return {**self._asdict(), "metrics": metrics}


def reflection(problems: Sequence[Sequence[Sample]], seed: int) -> Reflection:
    """Return the metrics with their 95% intervals over problems, see statistics.estimates.

    The correlation is that of the means, and its interval of the same resamples without those in
    which all c or all e are equal; where it is the same in all of them there is none.

    Args:
        problems: each with its samples; their order matters.
        seed: of the bootstrap.
    """
    clear = [[s for s in samples if s.reflects is not None] for samples in problems]
    counted = [samples for samples in clear if samples]
    num_samples = sum(map(len, counted))
    num_unclear = sum(map(len, problems)) - num_samples
    values = [_problem_values(samples) for samples in counted]
    metrics: dict[str, Estimate | None] = {}
    if values:
        metrics = {**estimates(values, seed), CORRELATION: _correlation(values, seed)}
    else:
        metrics = dict.fromkeys((*_problem_values([Sample(False, False)]), CORRELATION))
    return Reflection(len(counted), num_samples, num_unclear, metrics)


def reflection_by_task(
    problems: Sequence[Sequence[Sample]], tasks: Sequence[str | None], seed: int
) -> dict[str, Reflection]:
    """Return the metrics of each task's problems, the tasks in order.

    Args:
        problems, seed: see reflection.
        tasks: of each problem; None: it has none, and is in no task's.
    """
    groups: dict[str, list[Sequence[Sample]]] = {}
    for samples, task in zip(problems, tasks, strict=True):
        if task is not None:
            groups.setdefault(task, []).append(samples)
    return {task: reflection(some, seed) for task, some in sorted(groups.items())}


def phi(accuracy: float, share_reflecting: float, both: float) -> float | None:
    """Return the correlation of two events from their shares, None if a share is 0 or 1.

        (P(c e) - P(c) P(e)) / sqrt(P(c) (1 - P(c)) P(e) (1 - P(e)))

    Args:
        accuracy: P(c).
        share_reflecting: P(e).
        both: P(c e).
    """
    variance = accuracy * (1 - accuracy) * share_reflecting * (1 - share_reflecting)
    if variance <= 0:
        return None
    return min(1.0, max(-1.0, (both - accuracy * share_reflecting) / math.sqrt(variance)))


def _problem_values(samples: Sequence[Sample]) -> dict[str, float]:
    size = len(samples)
    pairs = [(s.is_correct, bool(s.reflects)) for s in samples]
    return {
        "accuracy": sum(c for c, _ in pairs) / size,
        "reflection": sum(e for _, e in pairs) / size,
        "accurate_explicit": sum(c and e for c, e in pairs) / size,
        "accurate_implicit": sum(c and not e for c, e in pairs) / size,
    }


def _correlation(problems: Sequence[Mapping[str, float]], seed: int) -> Estimate | None:
    names = ("accuracy", "reflection", "accurate_explicit")
    of_all = means(problems)
    value = phi(*(of_all[name] for name in names))
    if value is None:
        return None
    drawn = resampled_means(np.array([[p[name] for name in names] for p in problems]), seed)
    found = [r for row in drawn.tolist() if (r := phi(*row)) is not None]
    if len(problems) == 1 or not found or math.isclose(min(found), max(found), abs_tol=1e-12):
        return Estimate(value, None, None)
    low, high = np.percentile(found, [2.5, 97.5]).tolist()
    return Estimate(value, low, high)

"""The concise example's results: accuracy and length before and after, and the table of them."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ablation_table import spread
from concise_jobs import MAIN, SETS

Row = Mapping[str, Any]
"""A problem's line of an evaluation's samples file."""

LENGTH_TARGET = -0.20
ACCURACY_TARGET = -0.01
"""Of the second phase: change of the length of correct responses at most, of accuracy at least."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A policy on the held-out problems."""

    accuracy: float
    standard_error: float
    """Of the accuracy on these problems, from sampling alone."""
    correct_length: float
    """Mean tokens of the correct responses."""
    length: float
    """Mean tokens of all responses."""


@dataclasses.dataclass(frozen=True)
class Second:
    """A second phase of a seed."""

    before: Measured
    after: Measured
    negative: Sequence[float]
    """Share of responses with a negative reward, in each training step."""
    lengths: Sequence[float]
    """Mean tokens of the responses of each training step."""

    @property
    def accuracy_change(self) -> float:
        """After less before."""
        return self.after.accuracy - self.before.accuracy

    @property
    def standard_error(self) -> float:
        """Of the change of accuracy."""
        return math.hypot(self.before.standard_error, self.after.standard_error)

    @property
    def length_change(self) -> float:
        """Of correct responses, relative to before."""
        return self.after.correct_length / self.before.correct_length - 1

    @property
    def meets_target(self) -> bool:
        """Shorter correct responses at no loss of accuracy."""
        return self.length_change <= LENGTH_TARGET and self.accuracy_change >= ACCURACY_TARGET


def read_samples(file: Path) -> list[Row]:
    """Return the problems of a samples file, in order."""
    _, *lines = file.read_text().splitlines()
    return [json.loads(line) for line in lines]


def measured(rows: Sequence[Row]) -> Measured:
    """Summarise samples of distinct problems.

    The accuracy is the mean over problems of the share p of k correct samples; its variance is the
    mean of p(1 - p)/(k - 1) divided by the number of problems.
    """
    rates, variances, correct, all_tokens = [], [], [], []
    for row in rows:
        tokens = [one["num_tokens"] for one in row["responses"]]
        right = [one["num_tokens"] for one in row["responses"] if one["status"] == "correct"]
        rate = len(right) / len(tokens)
        rates.append(rate)
        variances.append(rate * (1 - rate) / max(len(tokens) - 1, 1))
        correct += right
        all_tokens += tokens
    return Measured(
        accuracy=statistics.fmean(rates),
        standard_error=math.sqrt(statistics.fmean(variances) / len(rows)),
        correct_length=statistics.fmean(correct) if correct else math.nan,
        length=statistics.fmean(all_tokens),
    )


def second(before: Measured, after: Measured, rows: Sequence[Mapping[str, Any]]) -> Second:
    """Put together a second phase; rows: of its metrics.jsonl."""
    trained = [row for row in rows if "reward/correct_fraction" in row]
    return Second(
        before,
        after,
        [1 - row["reward/correct_fraction"] for row in trained],
        [row["rollout/response_length_mean"] for row in trained],
    )


Seconds = Mapping[str, Mapping[int, Second]]
"""Second phases by set of problems and seed."""


def markdown(found: Seconds) -> str:
    """Return a table of the seeds, whether they meet the target, and a table of the sets."""
    main = found.get(MAIN, {})
    lines = [
        f"{SETS[MAIN].title}:", "",
        "| seed | accuracy before | after | change | correct length before | after | change |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for seed, one in sorted(main.items()):
        lines.append(
            f"| {seed} | {one.before.accuracy:.4f} | {one.after.accuracy:.4f} "
            f"| {one.accuracy_change:+.4f} (standard error {one.standard_error:.4f}) "
            f"| {one.before.correct_length:.1f} | {one.after.correct_length:.1f} "
            f"| {one.length_change:+.1%} |"
        )
    met = sum(one.meets_target for one in main.values())
    lines += [
        "",
        f"target: correct responses at least {-LENGTH_TARGET:.0%} shorter, accuracy at most "
        f"{-ACCURACY_TARGET:g} lower: met by {met} of {len(main)} seeds",
        "",
        "| problems of the second phase | negative rewards | correct length | accuracy |",
        "|---|---|---|---|",
    ]
    for name, of_seeds in found.items():
        lines.append(f"| {SETS[name].title} | {' | '.join(_cells(list(of_seeds.values())))} |")
    return "\n".join(lines) + "\n"


def _cells(of_seeds: Sequence[Second]) -> list[str]:
    """Mean and standard deviation over seeds: share of negative rewards, changes."""
    shown: list[tuple[Callable[[Second], float], str]] = [
        (lambda one: statistics.fmean(one.negative), ".3f"),
        (lambda one: one.length_change, "+.1%"),
        (lambda one: one.accuracy_change, "+.4f"),
    ]
    return [spread([value(one) for one in of_seeds], form) for value, form in shown]

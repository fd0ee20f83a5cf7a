"""What vapo evaluate writes: a summary, and the accuracy and length of each problem's samples."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SAMPLES = "samples.jsonl"
"""The samples file in an evaluation's directory; samples.json beside it has the summary."""
Row = Mapping[str, Any]
"""A problem's line of a samples file."""


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


def read_samples(file: Path) -> list[Row]:
    """Return the problems of a samples file, in order."""
    _, *lines = file.read_text().splitlines()
    return [json.loads(line) for line in lines]


def read_summary(out: Path) -> dict[str, Any]:
    """Return the summary in an evaluation's directory."""
    return json.loads((out / SAMPLES).with_suffix(".json").read_text())


def mean_accuracy(summary: Mapping[str, Any]) -> float:
    """Return a summary's avg@K."""
    (average,) = (name for name in summary["statistics"] if name.startswith("avg@"))
    return summary["statistics"][average]["value"]


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

"""The concise example's results: accuracy and length before and after, their table and plot."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from runner import curves, tables
from runner.samples import Measured, measured

from concise.arms import MAIN, SETS

Row = Mapping[str, Any]
"""A problem's line of a samples file, or a step's of metrics.jsonl."""

LENGTH_TARGET = -0.20
ACCURACY_TARGET = -0.01
"""Of the second phase: change of the length of correct responses at most, of accuracy at least."""
COLORS = dict(zip(SETS, ("#2563eb", "#059669", "#d97706", "#dc2626"), strict=True))


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
    def mean_negative(self) -> float:
        """Mean of `negative` over the steps."""
        return statistics.fmean(self.negative)

    @property
    def meets_target(self) -> bool:
        """Shorter correct responses at no loss of accuracy."""
        return self.length_change <= LENGTH_TARGET and self.accuracy_change >= ACCURACY_TARGET


def second(before: Sequence[Row], after: Sequence[Row], rows: Sequence[Row]) -> Second:
    """Put together a second phase; rows: of its metrics.jsonl."""
    trained = [row for row in rows if "reward/correct_fraction" in row]
    return Second(
        measured(before),
        measured(after),
        [1 - row["reward/correct_fraction"] for row in trained],
        [row["rollout/response_length_mean"] for row in trained],
    )


COLUMNS = {
    "negative rewards": tables.mean(lambda one: one.mean_negative),
    "correct length": tables.mean(lambda one: one.length_change, "+.1%"),
    "accuracy": tables.mean(lambda one: one.accuracy_change, "+.4f"),
}


def markdown(found: tables.Runs) -> str:
    """Return a table of the seeds, whether they meet the target, and a table of the sets.

    found: second phases by set of problems and seed.
    """
    main = found.get(MAIN, {})
    names = "seed|accuracy before|after|change|correct length before|after|change".split("|")
    of_seeds = [
        [
            str(seed), f"{one.before.accuracy:.4f}", f"{one.after.accuracy:.4f}",
            f"{one.accuracy_change:+.4f} (standard error {one.standard_error:.4f})",
            f"{one.before.correct_length:.1f}", f"{one.after.correct_length:.1f}",
            f"{one.length_change:+.1%}",
        ]
        for seed, one in sorted(main.items())
    ]  # fmt: skip
    titles = {name: SETS[name].title for name in found}
    return (
        f"{SETS[MAIN].title}:\n\n{tables.markdown(names, of_seeds)}\n"
        f"target: correct responses at least {-LENGTH_TARGET:.0%} shorter, accuracy at most "
        f"{-ACCURACY_TARGET:g} lower: met by {sum(one.meets_target for one in main.values())} of "
        f"{len(main)} seeds\n\n"
        + tables.of_arms("problems of the second phase", titles, COLUMNS, found)
    )


def plot(found: tables.Runs) -> str:
    """Return an SVG of two panels: the change of the length by the share of negative rewards.

    Left: a point for each second phase; its share in training, and the change of the mean length of
    its responses to held-out problems. Right: a point for each training step, with the mean length
    relative to the phase's first step; points of a phase are joined.
    """

    def whole(one: Second) -> curves.Curve:
        return [(one.mean_negative, one.after.length / one.before.length - 1)]

    def steps(one: Second) -> curves.Curve:
        return [(n, length / one.lengths[0] - 1) for n, length in zip(one.negative, one.lengths)]

    panels = []
    for title, curve, radius in (
        ("held-out response length after the second phase", whole, 6),
        ("training response length, by step", steps, 2.5),
    ):
        lines = [
            curves.Line(SETS[name].title, COLORS[name], [*map(curve, of.values())], radius)
            for name, of in found.items()
        ]
        heights = [y for line in lines for points in line.curves for _, y in points] + [0.0]
        low = math.floor(10 * min(heights))
        high = max(math.ceil(10 * max(heights)), low + 1)
        panels.append(
            curves.Panel(
                title, "share of negative rewards", lines, low / 10, high / 10,
                ticks=[(i / 4, f"{i / 4:g}") for i in range(5)], end=1.0,
                levels=[(i / 10, f"{10 * i:+d} %") for i in range(low, high + 1)],
            )
        )  # fmt: skip
    return curves.draw(panels, per_row=2)

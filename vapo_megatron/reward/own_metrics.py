"""Metrics of a verifier's own: the means of the numbers that its verdicts name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vapo_megatron.config.metrics import emits, own_metric
from vapo_megatron.data.rollout import ScoredRollout

Sums = Mapping[str, tuple[float, int]]
"""Name -> (sum, how many verdicts have it)."""


def sums_of(scored: Iterable[ScoredRollout]) -> Sums:
    """Return the sums of a rank's responses; other ranks may have other names."""
    sums: dict[str, tuple[float, int]] = {}
    for item in scored:
        for name, value in item.metrics.items():
            total, count = sums.get(name, (0.0, 0))
            sums[name] = total + float(value), count + 1
    return sums


@emits("reward/own/NAME")
def own_metrics(parts: Iterable[Sums]) -> dict[str, float]:
    """Return each name's mean over the verdicts that have it, of all ranks' sums."""
    totals: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, (value, number) in part.items():
            total, count = totals.get(name, (0.0, 0))
            totals[name] = total + value, count + number
    return {own_metric(name): total / count for name, (total, count) in sorted(totals.items())}

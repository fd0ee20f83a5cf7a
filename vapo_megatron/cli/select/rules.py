"""The rules that keep prompts, on what their sampled responses measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vapo_megatron.config import RewardConfig
from vapo_megatron.data.problems import Problem
from vapo_megatron.errors import ConfigError
from vapo_megatron.rollout.evaluation.statistics import response_reward

_FAILED = ("failed", "timed_out")
"""Statuses without a score."""


class Rules(NamedTuple):
    """What is kept; a rule that is None keeps everything."""

    similarity: float | None = None
    """Drop prompts at least so similar to an earlier one, see duplicates.py; before sampling."""
    pass_rate: tuple[float, float] | None = None
    """Keep prompts whose share of correct responses lies in [low, high]."""
    hardest: int | float | None = None
    """Of the prompts that are left, keep so many, or this share (a float), with the lowest mean
    score."""
    within: str | None = None
    """Column whose values have scores of their own scale; None: the verifiers have."""

    def check(self) -> None:
        """Raise ConfigError: a number is out of its range."""
        if self.similarity is not None and not 0 < self.similarity <= 1:
            raise ConfigError(f"--drop-duplicates={self.similarity:g} must be in (0, 1]; change it")
        if self.pass_rate is not None and not 0 <= self.pass_rate[0] <= self.pass_rate[1] <= 1:
            low, high = self.pass_rate
            raise ConfigError(
                f"--pass-rate {low:g} {high:g} must be LOW HIGH, 0 <= LOW <= HIGH <= 1; change it"
            )
        if isinstance(self.hardest, float) and not 0 < self.hardest <= 1:
            raise ConfigError(
                f"--hardest={self.hardest:g} must be a share in (0, 1], or a whole number of "
                "prompts; change it"
            )
        if isinstance(self.hardest, int) and self.hardest < 1:
            raise ConfigError(f"--hardest={self.hardest} must be at least 1; change it")
        if self.within is not None and self.hardest is None:
            raise ConfigError(f"--within={self.within} needs --hardest, whose scores it compares")


class Measured(NamedTuple):
    """What a prompt's K responses measured."""

    verifier: str
    """The name of the one that judged them."""
    pass_rate: float
    """Share of correct responses; a failed verdict counts as not correct."""
    scores: tuple[float | None, ...]
    """Of each response; None: the verdict failed or timed out."""
    lengths: tuple[int, ...]
    """Of each response, in tokens."""
    truncated_fraction: float

    @property
    def score_mean(self) -> float | None:
        """Mean over the responses that have a score; None: none has."""
        known = [score for score in self.scores if score is not None]
        return math.fsum(known) / len(known) if known else None

    @property
    def length_mean(self) -> float:
        """In tokens."""
        return sum(self.lengths) / len(self.lengths)


def measure(line: Mapping[str, Any], reward: RewardConfig) -> Measured:
    """Return what a line of the samples file measured.

    With reward.from_score, and of episodes, whose turns have rewards, a score is the reward that
    training would give, without its punishment of length; otherwise it is the verdict's own, or 1
    for a correct response and 0 for another.
    """
    verifier, responses = line["verifier"], line["responses"]
    size = len(responses)
    return Measured(
        verifier,
        sum(r["status"] == "correct" for r in responses) / size,
        tuple(_score(r, reward, verifier) for r in responses),
        tuple(r["num_tokens"] for r in responses),
        sum(bool(r["truncated"]) for r in responses) / size,
    )


def _score(response: Mapping[str, Any], reward: RewardConfig, verifier: str) -> float | None:
    status, score = response["status"], response["score"]
    if status in _FAILED:
        return None
    if reward.from_score is not None or "earned" in response:
        return response_reward(response, reward, verifier)
    return float(status == "correct" if score is None else score)


def best_response(line: Mapping[str, Any]) -> str | None:
    """Return the text of a line's response with the highest score, of equal ones the first.

    Only the verdicts' own scores count, such as a reward model's; None: no response has one.
    """
    scored = [r for r in line["responses"] if r["score"] is not None and r["status"] not in _FAILED]
    return max(scored, key=lambda r: r["score"])["text"] if scored else None


class Selection(NamedTuple):
    """Which prompts are kept, and why others are not."""

    kept: list[int]
    """Indices, ascending."""
    dropped: dict[str, int]
    """Rule -> how many prompts it dropped, in the order in which rules apply."""


def select(
    measured: Mapping[int, Measured], problems: Sequence[Problem], rules: Rules
) -> Selection:
    """Apply the rules to measured prompts.

    Args:
        measured: by index in problems; those that are no duplicates.
        problems: of the whole file.
        rules: the pass rate comes before the hardest.
    """
    dropped: dict[str, int] = {}
    if rules.similarity is not None:
        dropped["near-duplicates"] = len(problems) - len(measured)
    kept = sorted(measured)
    if rules.pass_rate is not None:
        low, high = rules.pass_rate
        passing = [i for i in kept if low <= measured[i].pass_rate <= high]
        dropped[f"pass rate outside [{low:g}, {high:g}]"] = len(kept) - len(passing)
        kept = passing
    if rules.hardest is not None:
        if rules.within is None:
            domains = [measured[i].verifier for i in kept]
        else:
            domains = [str(problems[i].metadata.get(rules.within)) for i in kept]
        scores = [measured[i].score_mean for i in kept]
        count = rules.hardest
        if isinstance(count, float):
            # A share that floating point holds as a little less keeps its whole number.
            count = max(1, math.floor(count * len(kept) + 1e-9))
        hardest = _lowest(kept, scores, domains, count)
        dropped[f"not among the {count:,} of the lowest scores"] = len(kept) - len(hardest)
        kept = hardest
    return Selection(kept, dropped)


def _lowest(
    indices: Sequence[int], scores: Sequence[float | None], domains: Sequence[str], count: int
) -> list[int]:
    """Return the indices of the lowest scores, standardized within their domains, ascending.

    Scores of different verifiers have different scales; within each domain they get mean 0 and
    standard deviation 1. Of equal scores the first are taken; prompts without a score are not.
    """
    by_domain: dict[str, list[float]] = {}
    for score, domain in zip(scores, domains):
        if score is not None:
            by_domain.setdefault(domain, []).append(score)
    scales = {}
    for domain, values in by_domain.items():
        mean = math.fsum(values) / len(values)
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
        scales[domain] = mean, spread or 1.0
    ranked = [
        ((score - scales[domain][0]) / scales[domain][1], index)
        for index, score, domain in zip(indices, scores, domains)
        if score is not None
    ]
    return sorted(index for _, index in sorted(ranked)[:count])

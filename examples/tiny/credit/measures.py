"""How well a step's advantages and values credit the keys that were chosen, against exact values.

RUN/credit.jsonl has a row per step; `Credit` says what is in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from credit.keys import Problem
from credit.values import Floats, Path, chances_of, follow, values

FILE = "credit.jsonl"


@dataclasses.dataclass(frozen=True)
class Response:
    """A response as the trainer has it; arrays are [T]."""

    problem: Problem
    tokens: Sequence[str]
    reward: float
    logprobs: Floats
    advantages: Floats | None
    values: Floats | None
    """None: there is no critic."""


@dataclasses.dataclass(frozen=True)
class Credit:
    """Of a step's responses, before the update."""

    key_correlation: float | None
    """Of estimated and true advantage over the key tokens; None: one of them is constant."""
    noise_ratio: float | None
    """Mean |advantage| of the filler tokens over that of the key tokens."""
    true_advantage: float
    """Mean |true advantage| of the key tokens."""
    explained_variance: float | None
    """Of the rewards by the values, over all tokens."""
    best_explained_variance: float | None
    """The same by the exact values: what a perfect critic would have."""
    good_keys: float
    """Share of the keys chosen."""
    copied: float
    """Share of the steps with the right label, the right lock and one of its keys."""
    value_error: float | None
    """Root mean square difference of values and exact values, over all tokens."""
    value_bias_by_lock: list[float] | None
    """Mean difference of value and exact value before the key of the first, second, ... lock."""
    value_spread_by_lock: list[float] | None
    """Standard deviation of that difference."""
    chances: list[float]
    """The policy's probability of each kind's good key."""


@dataclasses.dataclass(frozen=True)
class Exact:
    """Exact quantities of a step's responses."""

    paths: list[Path]
    chances: Floats
    values: list[Floats]
    """[T+1] each, see values.values."""


def exact(responses: Sequence[Response]) -> Exact:
    """Compute the exact values of a step's responses, under the policy that sampled them."""
    problems = [r.problem for r in responses]
    paths = [follow(r.problem, r.tokens) for r in responses]
    chances = chances_of(problems, paths, [r.logprobs for r in responses])
    found = values(problems, paths, chances, [r.reward for r in responses])
    return Exact(paths, chances, found)


def credit(responses: Sequence[Response], known: Exact) -> Credit:
    """Compare a step's advantages and values with the exact ones."""
    true = [np.diff(v) for v in known.values]
    of_keys = _at(true, [p.key_tokens for p in known.paths])
    rewards = np.concatenate([np.full(len(r.tokens), r.reward) for r in responses])
    best = np.concatenate([v[:-1] for v in known.values])
    num_keys = sum(len(p.key_tokens) for p in known.paths)
    result: dict[str, Any] = dict.fromkeys(
        (
            "key_correlation", "noise_ratio", "explained_variance", "value_error",
            "value_bias_by_lock", "value_spread_by_lock",
        )
    )  # fmt: skip
    if all(r.advantages is not None for r in responses):
        advantages = [r.advantages for r in responses]
        estimated = _at(advantages, [p.key_tokens for p in known.paths])
        filler = _at(advantages, [p.filler_tokens for p in known.paths])
        result["key_correlation"] = _correlation(estimated, of_keys)
        size = np.abs(estimated).mean()
        result["noise_ratio"] = float(np.abs(filler).mean() / size) if size > 0 else None
    if all(r.values is not None for r in responses):
        errors = [r.values - v[:-1] for r, v in zip(responses, known.values, strict=True)]
        result["explained_variance"] = _explained(
            np.concatenate([r.values for r in responses]), rewards
        )
        result["value_error"] = float(np.sqrt((np.concatenate(errors) ** 2).mean()))
        before_keys = _at(errors, [p.key_tokens for p in known.paths])
        lock = np.concatenate([p.key_locks for p in known.paths])
        groups = [before_keys[lock == i] for i in range(int(lock.max(initial=-1)) + 1)]
        result["value_bias_by_lock"] = [float(g.mean()) if len(g) else 0.0 for g in groups]
        result["value_spread_by_lock"] = [float(g.std()) if len(g) else 0.0 for g in groups]
    return Credit(
        true_advantage=float(np.abs(of_keys).mean()) if num_keys else 0.0,
        best_explained_variance=_explained(best, rewards),
        good_keys=float(np.concatenate([p.is_good for p in known.paths]).mean()),
        copied=num_keys / sum(len(r.problem.kinds) for r in responses),
        chances=known.chances.tolist(),
        **result,
    )


def _at(numbers: Sequence[Any], places: Sequence[Any]) -> Floats:
    return np.concatenate([n[p] for n, p in zip(numbers, places, strict=True)])


def _correlation(first: Floats, second: Floats) -> float | None:
    if len(first) < 2 or first.std() == 0 or second.std() == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _explained(values: Floats, returns: Floats) -> float | None:
    variance = returns.var()
    return float(1 - (returns - values).var() / variance) if variance > 0 else None


def row(step: int, found: Credit) -> dict[str, Any]:
    """Return the step's row of credit.jsonl; step counts from 1, as in metrics.jsonl."""

    def rounded(value: Any) -> Any:
        if isinstance(value, list):
            return [rounded(each) for each in value]
        return round(value, 4) if isinstance(value, float) else value

    return {"step": step, **{n: rounded(v) for n, v in dataclasses.asdict(found).items()}}

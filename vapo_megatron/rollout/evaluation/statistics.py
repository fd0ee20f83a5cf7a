"""Statistics of an evaluation: values per problem, their means, and 95% intervals.

Every statistic is the mean of one value per problem, so one bootstrap over problems serves all.
Where all problems have the same value, a bootstrap has no width, and Wilson's interval stands in.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vapo_megatron.config import RewardConfig
from vapo_megatron.reward.shaping import base_reward
from vapo_megatron.reward.verifier import Verdict

RESAMPLES = 10_000
"""Bootstrap samples: the interval's ends vary by about 1% of its width between seeds."""
_BLOCK_VALUES = 1 << 20
_Z = 1.959964
"""97.5 percentile of the standard normal distribution."""
_UNBOUNDED = ("response_length_mean", "reward_mean")
"""Statistics that do not lie in [0, 1]."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over problems, and its 95% interval; None: the problems give none."""

    value: float
    low: float | None
    high: float | None


def response_reward(response: Mapping[str, Any], reward: RewardConfig, verifier: str) -> float:
    """Return what training would give a judged response, without a punishment of length.

    An episode's is the sum of its turns' rewards and of the verdict's, where that has one.

    Args:
        response: see votes.Response.
        reward: turns a verdict into a number.
        verifier: the name of the one that judged it.
    """
    verdict = Verdict(response["status"], response["score"], response["answer"])
    base = base_reward(
        verdict, reward, verifier, truncated=bool(response["truncated"]),
        is_paid=bool(response.get("is_paid")),
    )  # fmt: skip
    return float(response.get("earned", 0.0)) + base


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that k of a problem's n samples contain a correct one.

        pass@k = 1 - C(n - c, k) / C(n, k)

    The k are drawn without replacement. Source: Chen et al. 2021 (arXiv 2107.03374), equation 1,
    which is unbiased for k <= n.

    Args:
        num_samples: n.
        num_correct: c.
        k: 1..n; k = 1 gives the fraction of correct samples.
    """
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples
    misses = math.comb(num_samples - num_correct, k)
    return 1.0 - misses / math.comb(num_samples, k)


def majority_at_k(votes: Sequence[int | None], is_correct: Sequence[bool]) -> float:
    """Return the probability that the most frequent answer of k samples is correct.

    Ties are broken at random: a correct answer among m tied ones gives 1/m. Samples without an
    answer do not vote; without any vote the result is 0.

    Args:
        votes: [k] class of equal answers of each sample, or None without an answer.
        is_correct: [k] the verifier's verdicts; all samples of a class have the same.
    """
    cast = [(v, right) for v, right in zip(votes, is_correct, strict=True) if v is not None]
    verdicts = dict(cast)
    assert all(verdicts[v] == right for v, right in cast), "one verdict per class"
    counts = collections.Counter(vote for vote, _ in cast)
    most = max(counts.values(), default=0)
    winners = [vote for vote, count in counts.items() if count == most]
    return sum(verdicts[vote] for vote in winners) / len(winners) if winners else 0.0


def pass_sizes(num_samples: int) -> list[int]:
    """Return the k of the pass@k to report for n samples: powers of two above 1, and n."""
    powers = (2**i for i in range(1, num_samples.bit_length()))
    return [*(k for k in powers if k < num_samples), num_samples]


def value_names(num_samples: int) -> list[str]:
    """Return the names in problem_values' result for n samples, in order."""
    passes = [f"pass@{k}" for k in pass_sizes(num_samples)]
    length = ["response_length_mean", "truncated_fraction"]
    return [f"avg@{num_samples}", *passes, f"majority@{num_samples}", *length]


def problem_values(responses: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return one problem's value of each statistic.

    Args:
        responses: its K samples, each with `status`, `vote`, `num_tokens` and `truncated`.

    Returns:
        value_names(K): avg@K, pass@k for pass_sizes(K), majority@K (NaN where a correct response
        has no vote: its verifier names no answers), response_length_mean in tokens, and
        truncated_fraction.
    """
    size = len(responses)
    is_correct = [r["status"] == "correct" for r in responses]
    votes = [r["vote"] for r in responses]
    has_votes = all(v is not None for v, right in zip(votes, is_correct, strict=True) if right)
    values = [
        sum(is_correct) / size,
        *(pass_at_k(size, sum(is_correct), k) for k in pass_sizes(size)),
        majority_at_k(votes, is_correct) if has_votes else math.nan,
        sum(r["num_tokens"] for r in responses) / size,
        sum(bool(r["truncated"]) for r in responses) / size,
    ]
    return dict(zip(value_names(size), values, strict=True))


def means(problems: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over problems of each statistic that all of them have (that is not NaN).

    Args:
        problems: results of problem_values.
    """
    sums = {name: math.fsum(p[name] for p in problems) for name in problems[0]}
    return {name: total / len(problems) for name, total in sums.items() if not math.isnan(total)}


def wilson_interval(mean: float, count: int) -> tuple[float, float]:
    """Return the 95% interval of a mean of values in [0, 1].

        (p + z^2/2n  -+  z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n),   z = 1.96

    Source: Wilson 1927, for a proportion. Values in between vary less than p (1 - p), the variance
    of zeros and ones, so the interval is no narrower than it must be.

    Args:
        mean: p.
        count: n, the number of values.
    """
    share = _Z**2 / count
    half = _Z * math.sqrt(mean * (1 - mean) / count + share / (4 * count))
    low, high = (mean + share / 2 - half) / (1 + share), (mean + share / 2 + half) / (1 + share)
    return max(low, 0.0), min(high, 1.0)


def estimates(problems: Sequence[Mapping[str, float]], seed: int) -> dict[str, Estimate]:
    """Return the mean of each of means' statistics with its 95% interval over problems.

    The problems are resampled RESAMPLES times with replacement, with the same draws for every
    statistic; the interval is between the 2.5 and 97.5 percentiles of the means (Efron's percentile
    method). It estimates how the value varies with the choice of problems. Where the value is the
    same for all problems, a statistic in [0, 1] has wilson_interval, and another none; one problem
    has none at all.

    Args:
        problems: results of problem_values; their order matters.
        seed: of the draws. RandomState is frozen: it is the same in all versions of numpy.
    """
    of_all = means(problems)
    values = np.array([[p[name] for name in of_all] for p in problems])
    if len(problems) == 1:
        return {name: Estimate(value, None, None) for name, value in of_all.items()}
    low, high = np.percentile(resampled_means(values, seed), [2.5, 97.5], axis=0).tolist()
    found = {}
    for i, (name, value) in enumerate(of_all.items()):
        interval: tuple[float | None, float | None] = low[i], high[i]
        if (values[:, i] == values[0, i]).all():
            is_bounded = name not in _UNBOUNDED
            interval = wilson_interval(value, len(problems)) if is_bounded else (None, None)
        found[name] = Estimate(value, *interval)
    return found


def resampled_means(values: np.ndarray, seed: int) -> np.ndarray:
    """Return the statistics' means [RESAMPLES, S] over problems drawn from values [P, S]."""
    random = np.random.RandomState(seed % 2**32)
    count = len(values)
    block = max(1, _BLOCK_VALUES // count)
    drawn = [
        values[random.randint(0, count, size=(min(block, RESAMPLES - done), count))].mean(axis=1)
        for done in range(0, RESAMPLES, block)
    ]
    return np.concatenate(drawn)


def as_json(statistics: dict[str, Estimate]) -> dict[str, dict[str, float | None]]:
    """Return JSON values."""
    return {name: dataclasses.asdict(estimate) for name, estimate in statistics.items()}

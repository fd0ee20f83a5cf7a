"""How much older the weights were that sampled a step's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from vapo_megatron.config.metrics import emits
from vapo_megatron.data.batch import ScoredRollout


def tokens_by_version(scored: Iterable[ScoredRollout]) -> Counter[int]:
    """Count response tokens by the version that sampled them."""
    counts: Counter[int] = Counter()
    for item in scored:
        for version, tokens in item.rollout.versions:
            counts[version] += tokens
    return counts


@emits("rollout/lag_mean", "rollout/lag_max")
def lag_metrics(tokens: Mapping[int, int], policy_version: int) -> dict[str, float]:
    """Return the lag, in versions, over tokens.

    Args:
        tokens: see tokens_by_version, of all ranks.
        policy_version: the trainer's.
    """
    total = sum(tokens.values())
    lags = [(policy_version - version, count) for version, count in tokens.items() if count]
    return {
        "rollout/lag_mean": sum(lag * count for lag, count in lags) / max(total, 1),
        "rollout/lag_max": float(max((lag for lag, _ in lags), default=0)),
    }


@emits("rollout/lag_share@K")
def lag_shares(tokens: Mapping[int, int], policy_version: int) -> dict[str, float]:
    """Return the share of each lag above 0 that there is; for arguments: lag_metrics."""
    total = sum(tokens.values())
    return {
        f"rollout/lag_share@{policy_version - version}": count / total
        for version, count in sorted(tokens.items(), reverse=True)
        if count and version < policy_version
    }

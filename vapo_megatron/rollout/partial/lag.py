"""How much older the weights were that sampled a step's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from vapo_megatron.config.metrics import emits
from vapo_megatron.data.rollout import ScoredRollout


def tokens_by_version(scored: Iterable[ScoredRollout]) -> Counter[int]:
    """Count response tokens by the version that sampled them."""
    counts: Counter[int] = Counter()
    for item in scored:
        for version, tokens in item.rollout.versions:
            counts[version] += tokens
    return counts


@emits("rollout/lag_mean", "rollout/lag_max", "rollout/lag_share@K")
def lag_metrics(tokens: Mapping[int, int], policy_version: int) -> dict[str, float]:
    """Return the lag, in versions, over tokens, and the share of each lag above 0 that there is.

    Args:
        tokens: see tokens_by_version, of all ranks.
        policy_version: the trainer's.
    """
    total = max(sum(tokens.values()), 1)
    lags = {
        policy_version - version: count / total
        for version, count in sorted(tokens.items(), reverse=True)
        if count
    }
    return {
        "rollout/lag_mean": sum(lag * share for lag, share in lags.items()),
        "rollout/lag_max": float(max(lags, default=0)),
        **{f"rollout/lag_share@{lag}": share for lag, share in lags.items() if lag},
    }

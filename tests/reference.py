"""float64 references: plain Python loops over lists of floats, written from the equations.

They share no code with the package and use no tensor operation, so that a mistake cannot stand on
both sides. Sequences are given packed, with bounds, as the package takes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Floats = Sequence[float]


def per_response(value: float | Floats, num_responses: int) -> list[float]:
    """One float for every response."""
    if isinstance(value, float | int):
        return [float(value)] * num_responses
    assert len(value) == num_responses
    return [float(x) for x in value]


def gae(
    token_rewards: Floats,
    values: Floats,
    bounds: Sequence[int],
    lam: float | Floats,
    gamma: float = 1.0,
) -> list[float]:
    """A_t = delta_t + gamma * lambda * A_{t+1}, delta_t = r_t + gamma * V_{t+1} - V_t."""
    lams = per_response(lam, len(bounds) - 1)
    advantages = [0.0] * len(token_rewards)
    for b in range(len(bounds) - 1):
        following_advantage = following_value = 0.0
        for t in range(bounds[b + 1] - 1, bounds[b] - 1, -1):
            delta = token_rewards[t] + gamma * following_value - values[t]
            following_advantage = delta + gamma * lams[b] * following_advantage
            following_value = values[t]
            advantages[t] = following_advantage
    return advantages


def monte_carlo_returns(
    token_rewards: Floats, bounds: Sequence[int], gamma: float = 1.0
) -> list[float]:
    """G_t = sum_k gamma^k r_{t+k}."""
    returns = [0.0] * len(token_rewards)
    for b in range(len(bounds) - 1):
        following = 0.0
        for t in range(bounds[b + 1] - 1, bounds[b] - 1, -1):
            following = token_rewards[t] + gamma * following
            returns[t] = following
    return returns


def policy_loss(
    logprobs: Floats,
    old_logprobs: Floats,
    advantages: Floats,
    weights: Floats,
    *,
    clip_low: float,
    clip_high: float,
    count: float,
) -> tuple[float, list[float]]:
    """-1/N sum_t w_t min(r_t A_t, clip(r_t) A_t); its gradient.

    d loss / d logprobs_t = -w_t r_t A_t / N, or 0 where the clip is active.
    """
    total, gradient = 0.0, []
    for new, old, advantage, weight in zip(logprobs, old_logprobs, advantages, weights):
        ratio = math.exp(new - old)
        held = min(max(ratio, 1 - clip_low), 1 + clip_high)
        total -= weight * min(ratio * advantage, held * advantage)
        above = advantage > 0 and ratio > 1 + clip_high
        below = advantage < 0 and ratio < 1 - clip_low
        gradient.append(0.0 if above or below else -weight * ratio * advantage / count)
    return total / count, gradient


def dis_loss(
    logprobs: Floats,
    sampled: Floats,
    advantages: Floats,
    weights: Floats,
    *,
    low: float,
    high: float,
    count: float,
    at: Floats | None = None,
) -> tuple[float, list[float]]:
    """-1/N sum_t w_t f_t A_t log pi_t, f = r inside (1 - low, 1 + high), else 0; its gradient.

    f is a constant: of the log-probabilities `at`, by default these.
    """
    factors = []
    for new, mu in zip(at or logprobs, sampled):
        r = math.exp(new - mu)
        factors.append(r if 1 - low < r < 1 + high else 0.0)
    return _weighted(factors, logprobs, advantages, weights, count)


def dppo_tv_loss(
    logprobs: Floats,
    sampled: Floats,
    advantages: Floats,
    weights: Floats,
    *,
    difference: float,
    cap: float,
    count: float,
    at: Floats | None = None,
) -> tuple[float, list[float]]:
    """-1/N sum_t w_t keep_t min(r_t, cap) A_t log pi_t; its gradient. `at`: see dis_loss."""
    factors = []
    for new, mu, advantage in zip(at or logprobs, sampled, advantages):
        moved = math.exp(new) - math.exp(mu)
        kept = moved <= difference if advantage > 0 else moved >= -difference
        factors.append(min(math.exp(new - mu), cap) if kept else 0.0)
    return _weighted(factors, logprobs, advantages, weights, count)


def _weighted(
    factors: Floats, logprobs: Floats, advantages: Floats, weights: Floats, count: float
) -> tuple[float, list[float]]:
    gradient = [-w * f * a / count for f, a, w in zip(factors, advantages, weights)]
    return sum(g * x for g, x in zip(gradient, logprobs)), gradient


def ranged_value(head: float, low: float, high: float) -> tuple[float, float]:
    """low + (high - low) (1/2 + atan(head) / pi); its slope."""
    value = low + (high - low) * (0.5 + math.atan(head) / math.pi)
    return value, (high - low) / (math.pi * (1 + head * head))


def value_loss(
    values: Floats,
    returns: Floats,
    weights: Floats,
    *,
    count: float,
    old_values: Floats | None = None,
    clip: float | None = None,
) -> tuple[float, list[float]]:
    """1/N sum_t w_t 0.5 (V_t - R_t)^2, or the larger of it and its clipped form; its gradient.

    d loss / d V_t = w_t (V_t - R_t) / N, or 0 where the clipped form is the larger one.
    """
    total, gradient = 0.0, []
    for t, (value, target, weight) in enumerate(zip(values, returns, weights)):
        squared, slope = (value - target) ** 2, value - target
        if clip is not None:
            assert old_values is not None
            moved = value - old_values[t]
            held = old_values[t] + math.copysign(clip, moved)
            if abs(moved) > clip and (held - target) ** 2 > squared:
                squared, slope = (held - target) ** 2, 0.0
        total += weight * 0.5 * squared
        gradient.append(weight * slope / count)
    return total / count, gradient


def aggregation(mask: Floats, bounds: Sequence[int], level: str) -> tuple[list[float], float]:
    """(w_t, N): m_t and the tokens where it is not 0, or m_t/|o_i| and their responses."""
    weights = [float(m) for m in mask]
    kept = [m != 0 for m in mask]
    if level == "token":
        return weights, float(sum(kept))
    responses = 0
    for start, stop in zip(bounds[:-1], bounds[1:]):
        length = sum(kept[start:stop])
        responses += length > 0
        for t in range(start, stop):
            weights[t] /= max(length, 1)
    return weights, float(responses)


def sampler_mask(
    old: Floats, rollout: Floats, mask: Floats, *, low: float, high: float, drops: bool
) -> list[float]:
    """m_t k_t, k_t = exp(old - rollout) held within the range, or 0 where it is outside."""
    weights = []
    for trained, sampled, weight in zip(old, rollout, mask):
        k = math.exp(trained - sampled)
        outside = 0.0 if drops else min(max(k, low), high)
        weights.append(weight * (k if low <= k <= high else outside))
    return weights


def reference_kl(
    logprobs: Floats, reference: Floats, weights: Floats, *, count: float
) -> tuple[float, list[float]]:
    """1/N sum_t w_t (exp(d_t) - d_t - 1), d = reference - logprobs; and d loss / d logprobs."""
    total, gradient = 0.0, []
    for logprob, theirs, weight in zip(logprobs, reference, weights):
        d = theirs - logprob
        total += weight * (math.exp(d) - d - 1)
        gradient.append(weight * (1 - math.exp(d)) / count)
    return total / count, gradient


def positive_lm_loss(
    logprobs: Floats, weights: Floats, is_correct: Sequence[bool], *, count: float
) -> float:
    """-1/N sum over tokens of correct responses of w_t log pi_t."""
    total = 0.0
    for logprob, weight, correct in zip(logprobs, weights, is_correct):
        if correct:
            total -= weight * logprob
    return total / count


def explained_variance(values: Floats, returns: Floats) -> float:
    """1 - Var(R - V) / Var(R), in two passes."""
    errors = [r - v for v, r in zip(values, returns)]
    return 1 - _variance(errors) / _variance(returns)


def _variance(x: Floats) -> float:
    mean = math.fsum(x) / len(x)
    return math.fsum((a - mean) ** 2 for a in x) / len(x)


def numerical_gradient(function, x: Floats, step: float = 1e-6) -> list[float]:
    """Central differences of function(list of floats) -> float."""
    gradient = []
    for i in range(len(x)):
        up, down = list(x), list(x)
        up[i] += step
        down[i] -= step
        gradient.append((function(up) - function(down)) / (2 * step))
    return gradient

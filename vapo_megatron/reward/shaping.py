"""From a verdict to a reward. Shaping never changes the verdict."""

from __future__ import annotations

import dataclasses

from vapo_megatron.config import RewardConfig, ScaleConfig
from vapo_megatron.reward.verifier import Status, Verdict


def soft_overlong_punishment(
    response_length: int, max_response_tokens: int, buffer_tokens: int
) -> float:
    """Return DAPO's penalty for a response that ends close to the length limit, or at it.

        0                                 |y| <= L_max - L_cache
        ((L_max - L_cache) - |y|)/L_cache  inside the buffer
        -1                                |y| >= L_max

    Source: DAPO (arXiv 2503.14476), section 3.4, equation 13.

    Args:
        response_length: |y|, tokens of the response, its stop token included.
        max_response_tokens: L_max.
        buffer_tokens: L_cache; 0: no penalty at any length.

    Returns:
        A number in [-1, 0].
    """
    if buffer_tokens == 0:
        return 0.0
    over = response_length - (max_response_tokens - buffer_tokens)
    return -min(max(over / buffer_tokens, 0.0), 1.0)


def full_score(reward: RewardConfig, verifier: str) -> float | None:
    """Return the least score, before scaling, whose reward is from_score's high; None: no range."""
    if reward.from_score is None:
        return None
    scale, high = _scale(reward, verifier), reward.from_score[1]
    if scale.mean is not None and scale.std is not None:
        return scale.mean + high * scale.std
    return high if scale.high is None else scale.high


def scored_verdict(verdict: Verdict, reward: RewardConfig, verifier: str) -> Verdict:
    """Return the verdict whose status follows its score, where reward.from_score says so.

    A score outside its range is no verdict: it has failed. The score of a verdict that its verifier
    calls failed or timed out is none. Any other stays as it was given.

    Args:
        verdict: as the verifier gave it.
        reward: has the range of scores, and the thresholds.
        verifier: its name, for reward.scales.
    """
    if reward.from_score is None or verdict.score is None:
        return verdict
    if verdict.status in ("failed", "timed_out"):
        return dataclasses.replace(verdict, score=None)
    scale = _scale(reward, verifier)
    if scale.mean is None:
        low, high, field = *reward.from_score, "reward.from_score"
        if scale.low is not None and scale.high is not None:
            low, high, field = scale.low, scale.high, f"reward.scales.{verifier}"
        if not low <= verdict.score <= high:
            note = f"score {verdict.score:g} is outside {field}=[{low:g}, {high:g}]"
            return Verdict("failed", answer=verdict.answer, note=note)
    if scale.correct_from is not None:
        is_correct = verdict.score >= scale.correct_from
    elif reward.correct_from is not None:
        is_correct = scaled_score(verdict.score, reward, verifier) >= reward.correct_from
    else:
        return verdict
    status: Status = "correct" if is_correct else "wrong"
    return dataclasses.replace(verdict, status=status)


def scaled_score(score: float, reward: RewardConfig, verifier: str) -> float:
    """Return a score on the scale of reward.from_score, in its range [L, H].

        (score - mean) / std, clipped to [L, H]       with mean and std
        L + (score - low) / (high - low) * (H - L)    with low and high
        score                                         with neither

    Args:
        score: in its verifier's range; see scored_verdict.
        reward: with from_score.
        verifier: its name, for reward.scales.
    """
    assert reward.from_score is not None
    (lowest, highest), scale = reward.from_score, _scale(reward, verifier)
    if scale.mean is not None and scale.std is not None:
        return min(max((score - scale.mean) / scale.std, lowest), highest)
    if scale.low is not None and scale.high is not None:
        share = (score - scale.low) / (scale.high - scale.low)
        return min(lowest + share * (highest - lowest), highest)
    return score


def shaped_reward(
    verdict: Verdict,
    truncated: bool,
    response_length: int,
    reward: RewardConfig,
    max_response_tokens: int,
    verifier: str,
    *,
    is_paid: bool = False,
) -> float:
    """Return the reward of a whole response.

    Args:
        verdict: from scored_verdict.
        truncated: the length limit ended the response; with a correct answer it then gets
            `truncated_correct`. A reward that is the verdict's score does not depend on it.
        response_length: tokens of the response, its stop token included.
        reward: the values; `overlong_penalty` scales the penalty.
        max_response_tokens: the sampling limit.
        verifier: its name, for reward.scales.
        is_paid: see base_reward.
    """
    punishment = soft_overlong_punishment(
        response_length, max_response_tokens, reward.overlong_buffer_tokens
    )
    base = base_reward(verdict, reward, verifier, truncated=truncated, is_paid=is_paid)
    return base + reward.overlong_penalty * punishment


def base_reward(
    verdict: Verdict,
    reward: RewardConfig,
    verifier: str,
    *,
    truncated: bool = False,
    is_paid: bool = False,
) -> float:
    """Return the reward without the punishment of length; see shaped_reward.

    is_paid: the rewards of an episode's turns are all (Episode.is_paid); the verdict has none.
    """
    if is_paid:
        return 0.0
    if reward.from_score is not None and verdict.score is not None:
        return scaled_score(verdict.score, reward, verifier)
    correct, incorrect, truncated_correct = _of_status(reward, verifier)
    if not verdict.is_correct:
        return incorrect
    return truncated_correct if truncated else correct


def _of_status(reward: RewardConfig, verifier: str) -> tuple[float, float, float]:
    """Return the rewards without a score: of a correct verdict, any other, a truncated correct."""
    if reward.from_score is None:
        return reward.correct, reward.incorrect, reward.truncated_correct
    (low, high), scale = reward.from_score, _scale(reward, verifier)
    correct = high if scale.correct is None else scale.correct
    truncated = correct if scale.truncated_correct is None else scale.truncated_correct
    return correct, low if scale.incorrect is None else scale.incorrect, truncated


_UNSCALED = ScaleConfig()


def _scale(reward: RewardConfig, verifier: str) -> ScaleConfig:
    return reward.scales.get(verifier, _UNSCALED)

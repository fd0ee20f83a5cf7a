"""From a verdict to a reward. Shaping never changes the verdict."""

from __future__ import annotations

import dataclasses

from vapo_megatron.config import RewardConfig
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


def scored_verdict(verdict: Verdict, reward: RewardConfig) -> Verdict:
    """Return the verdict whose status follows its score, where reward.from_score says so.

    A score outside reward.from_score is no verdict: it has failed.
    """
    if reward.from_score is None or verdict.score is None:
        return verdict
    low, high = reward.from_score
    if not low <= verdict.score <= high:
        note = f"score {verdict.score:g} is outside reward.from_score=[{low:g}, {high:g}]"
        return Verdict("failed", answer=verdict.answer, note=note)
    if reward.correct_from is None:
        return verdict
    status: Status = "correct" if verdict.score >= reward.correct_from else "wrong"
    return dataclasses.replace(verdict, status=status)


def shaped_reward(
    verdict: Verdict,
    truncated: bool,
    response_length: int,
    reward: RewardConfig,
    max_response_tokens: int,
) -> float:
    """Return the reward of a whole response.

    Args:
        verdict: from scored_verdict.
        truncated: the length limit ended the response; with a correct answer it then gets
            `truncated_correct`. A reward that is the verdict's score does not depend on it.
        response_length: tokens of the response, its stop token included.
        reward: the values; `overlong_penalty` scales the penalty.
        max_response_tokens: the sampling limit.
    """
    if reward.from_score is not None:
        base = reward.from_score[0] if verdict.score is None else verdict.score
    elif not verdict.is_correct:
        base = reward.incorrect
    else:
        base = reward.truncated_correct if truncated else reward.correct
    punishment = soft_overlong_punishment(
        response_length, max_response_tokens, reward.overlong_buffer_tokens
    )
    return base + reward.overlong_penalty * punishment

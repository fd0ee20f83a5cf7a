"""From a verdict to a reward. Shaping never changes the verdict."""

from __future__ import annotations

from vapo_megatron.config import RewardConfig


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


def shaped_reward(
    is_correct: bool,
    truncated: bool,
    response_length: int,
    reward: RewardConfig,
    max_response_tokens: int,
) -> float:
    """Return the reward of a whole response.

    Args:
        is_correct: the verifier's verdict.
        truncated: the length limit ended the response; with a correct answer it then gets
            `truncated_correct`.
        response_length: tokens of the response, its stop token included.
        reward: the values; `overlong_penalty` scales the penalty.
        max_response_tokens: the sampling limit.
    """
    if not is_correct:
        base = reward.incorrect
    else:
        base = reward.truncated_correct if truncated else reward.correct
    punishment = soft_overlong_punishment(
        response_length, max_response_tokens, reward.overlong_buffer_tokens
    )
    return base + reward.overlong_penalty * punishment

"""From rollouts to scored rollouts. Not exercised: which rank holds the verifier."""

from vapo_megatron.config import RewardConfig
from vapo_megatron.data.batch import Prompt, Rollout
from vapo_megatron.reward.math_verifier import MathVerifier
from vapo_megatron.reward.scoring import score_rollouts


def rollout(text, answer, position, length=4, truncated=False):
    # The prompt holds the right answer in every format: only the response may count.
    prompt = Prompt(0, rf"Answer: {answer} \boxed{{{answer}}} #### {answer}", (1, 2), answer)
    return Rollout(prompt, 0, position, (5,) * length, (0.0,) * length, truncated, text, 0)


def test_the_response_alone_is_judged_and_the_verdict_stays_apart_from_the_reward():
    reward = RewardConfig(truncated_correct=-0.5, overlong_buffer_tokens=4, overlong_penalty=2.0)
    rollouts = [
        rollout("Answer: 1/2", "0.5", 9),
        rollout("Answer: 3", "0.5", 8),
        rollout("nothing", "7", 7),
        rollout("Answer: 7", "7", 6, length=10, truncated=True),
        rollout("Answer: 7", "7", 5, length=9),
    ]
    with MathVerifier(num_workers=1, timeout_seconds=60) as verifier:
        scored = score_rollouts(verifier, rollouts, reward, 10)
    assert [s.rollout.position for s in scored] == [9, 8, 7, 6, 5]
    assert [s.status for s in scored] == ["correct", "wrong", "unparsable", "correct", "correct"]
    assert [s.is_correct for s in scored] == [True, False, False, True, True]
    # Punishment of 10 tokens: -1 * 2; of 9: (6 - 9)/4 * 2 = -1.5.
    assert [s.reward for s in scored] == [1.0, -1.0, -1.0, -0.5 - 2.0, 1.0 - 1.5]


def test_without_a_verifier_nothing_is_scored():
    assert score_rollouts(None, [rollout("Answer: 7", "7", 0)], RewardConfig(), 10) == []

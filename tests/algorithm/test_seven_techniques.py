"""The paper's seven techniques: each is there by default, and its test goes red when it is off.

Every test states what the technique does, sees it with the default configuration, and sees the same
statement fail with the one field set that switches the technique off.

Not exercised: that the trainer passes these fields on (tests/e2e).
"""

import math

import pytest
import torch

from tests import reference
from vapo_megatron.algorithm.gae import decoupled_gae, resolve_lambdas
from vapo_megatron.algorithm.group_sampling import repeat_for_group
from vapo_megatron.algorithm.policy_loss import clipped_policy_loss, loss_count, token_weights
from vapo_megatron.algorithm.positive_lm_loss import positive_lm_loss
from vapo_megatron.algorithm.value_pretraining import actor_is_trained
from vapo_megatron.config import AlgorithmConfig

PAPER = AlgorithmConfig()


def holds(statement, **switched_off):
    """The statement holds for the paper's settings, and not with the technique switched off."""
    statement(PAPER)
    with pytest.raises(AssertionError):
        statement(PAPER.model_copy(update=switched_off))


def gae(config, rewards, values, lengths):
    """(advantages, returns), as the configuration asks for them."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    lambda_actor, lambda_critic = resolve_lambdas(
        cu_seqlens.diff(),
        lambda_actor=config.lambda_actor,
        lambda_critic=config.lambda_critic,
        length_adaptive_alpha=config.length_adaptive_alpha,
    )
    return decoupled_gae(
        rewards,
        values,
        cu_seqlens,
        lambda_actor=lambda_actor,
        lambda_critic=lambda_critic,
        gamma=config.gamma,
    )


def policy_gradient(config, ratio, advantages, lengths):
    """-d loss / d logprobs for one mini-batch of responses of these lengths."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.ones(len(ratio), dtype=torch.bool)
    logprobs = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    loss, _ = clipped_policy_loss(
        logprobs,
        torch.zeros_like(logprobs),
        torch.tensor(advantages, dtype=torch.float64),
        token_weights(mask, cu_seqlens, config.loss_aggregation),
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        num_tokens=loss_count(mask, cu_seqlens, config.loss_aggregation),
    )
    loss.backward()
    return (-logprobs.grad).tolist()


def test_value_pretraining():
    def the_critic_has_50_steps_to_itself(config):
        trained = [actor_is_trained(s, config.value_pretraining_steps) for s in range(60)]
        assert trained == [False] * 50 + [True] * 10

    holds(the_critic_has_50_steps_to_itself, value_pretraining_steps=0)


def test_decoupled_gae():
    # 400 tokens, reward 1 at the end: without bootstrap every state's target is exactly 1, however
    # wrong the values are, while the actor's advantage at the first token hardly sees the reward.
    rewards, values = torch.zeros(400), torch.linspace(-3, 3, 400)
    rewards[-1] = 1.0

    def the_critic_learns_from_outcomes_and_the_actor_from_values(config):
        advantages, returns = gae(config, rewards, values, [400])
        assert torch.equal(returns, torch.ones(400))
        lam = 1 - 1 / (0.05 * 400)
        expected = reference.gae(rewards.tolist(), values.tolist(), [0, 400], lam)
        torch.testing.assert_close(advantages.tolist(), expected, rtol=1e-5, atol=1e-6)

    statement = the_critic_learns_from_outcomes_and_the_actor_from_values
    holds(statement, lambda_critic="same_as_actor")
    holds(statement, lambda_critic=0.95)


def test_length_adaptive_gae():
    # With V = 0 the advantage at the first of l tokens is the reward's share lambda^(l-1). It tends
    # to exp(-1/alpha) at every length; at alpha .5, e^-2 = .135. A fixed lambda of .95 gives 4e-5
    # at 200 tokens and 1e-45 at 2000.
    lengths = [200, 2000, 16384]
    rewards = torch.zeros(sum(lengths), dtype=torch.float64)
    ends = torch.tensor(lengths).cumsum(0)
    rewards[ends - 1] = 1.0

    def every_length_sees_the_same_share_of_its_reward(config):
        config = config.model_copy(update={"length_adaptive_alpha": 0.5})
        advantages, _ = gae(config, rewards, torch.zeros_like(rewards), lengths)
        shares = [float(advantages[end - length]) for end, length in zip(ends, lengths)]
        assert shares == pytest.approx([math.exp(-2)] * 3, rel=0.01)

    statement = every_length_sees_the_same_share_of_its_reward
    for fixed in (0.95, 1.0, 0.9996):
        holds(statement, lambda_actor=fixed)


def test_clip_higher():
    # Ratio 1.25 with a positive advantage: above 1.2, below 1.28. Ratio .75 with a negative one:
    # below .8, clipped with either setting.
    def a_rare_good_token_may_grow_further_than_a_bad_one_may_shrink(config):
        up, down, beyond = policy_gradient(config, [1.25, 0.75, 1.29], [1.0, -1.0, 1.0], [3])
        assert up == pytest.approx(1.25 / 3)
        assert down == 0
        assert beyond == 0

    statement = a_rare_good_token_may_grow_further_than_a_bad_one_may_shrink
    holds(statement, clip_high=PAPER.clip_low)


def test_token_level_loss():
    # Responses of 1 and 9 tokens: with one denominator every token weighs 1/10. Averaged per
    # response first, the short one's token weighs 1/2 and the long one's 1/18 each.
    def every_token_weighs_the_same(config):
        gradient = policy_gradient(config, [1.0] * 10, [1.0] * 10, [1, 9])
        assert gradient == pytest.approx([0.1] * 10)

    holds(every_token_weighs_the_same, loss_aggregation="sample")


def test_positive_example_lm_loss():
    # Two correct tokens of four, policy loss apart: gradient mu / 2 = .05 towards each of them.
    def correct_responses_are_imitated(config):
        logprobs = torch.full((4,), -1.0, requires_grad=True)
        correct = torch.tensor([True, True, False, False])
        mask = torch.ones(4, dtype=torch.bool)
        loss = positive_lm_loss(logprobs, mask, correct, num_positive_tokens=correct.sum())
        (config.positive_lm_coef * loss).backward()
        assert (-logprobs.grad).tolist() == pytest.approx([0.05, 0.05, 0, 0])

    holds(correct_responses_are_imitated, positive_lm_coef=0.0)


def test_group_sampling():
    # 8192 responses: 512 prompts, 16 of each side by side.
    def each_prompt_is_sampled_16_times(config):
        prompts = list(range(config.responses_per_step // config.group_size))
        repeated = repeat_for_group(prompts, config.group_size)
        assert len(repeated) == 8192 and len(prompts) == 512
        assert repeated == [i // 16 for i in range(8192)]

    holds(each_prompt_is_sampled_16_times, group_size=1)

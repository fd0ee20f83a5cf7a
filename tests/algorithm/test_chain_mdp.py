"""GAE on a chain whose values are known: bias and variance of each lambda under a wrong critic.

A response of l tokens starts at state 0; each token steps up or down with probability 1/2, and the
reward, on the last token, is the state it ends in over sqrt(l), so that its variance is 1 at every
length. Exactly, then,

    V(t, s) = s / sqrt(l),   A(t, s, up) = 1 / sqrt(l) = -A(t, s, down).

The critic adds an error to each state, drawn once: V + ERROR * table[t, s]. What is measured is the
first token's advantage. Its bias is that of the difference between up and down, which alone moves a
policy, as the root mean square over critics. Pairs of responses take the same steps after the first
token.

Not exercised: a critic that learns.
"""

import functools
import math

import pytest
import torch

from vapo_megatron.algorithm.gae import decoupled_gae, length_adaptive_lambda

ALPHA = 0.05
ERROR = 0.3
CRITICS, PAIRS, STATES = 16, 32, 256
SHORT, EVEN, LONG = 100, 400, 2000


@functools.cache
def chain(length):
    """(token rewards [N], exact values [N], errors [N], tables): CRITICS x PAIRS x up and down.

    N = CRITICS * PAIRS * 2 * length, float64; tables are float32 [CRITICS, length, STATES]. A state
    stands in its table's column modulo STATES, which two states of a walk this short hardly share.
    """
    generator = torch.Generator().manual_seed(length)
    steps = torch.randint(2, (CRITICS, PAIRS, 1, length), generator=generator) * 2 - 1
    steps = steps.repeat(1, 1, 2, 1)
    steps[:, :, 0, 0], steps[:, :, 1, 0] = 1, -1
    after = steps.cumsum(-1)
    before = after - steps
    tables = torch.randn(CRITICS, length, STATES, generator=generator)
    critic, time = torch.arange(CRITICS).view(-1, 1, 1, 1), torch.arange(length)
    errors = tables[critic, time, before % STATES].double()
    rewards = torch.zeros_like(errors)
    rewards[..., -1] = after[..., -1].double() / math.sqrt(length)
    values = before.double() / math.sqrt(length)
    return rewards.flatten(), values.flatten(), errors.flatten(), tables


def first_advantages(length, lam, error):
    """float64 [CRITICS, PAIRS, 2], up and down; lam is a number or "adaptive"."""
    rewards, values, errors, _ = chain(length)
    responses = CRITICS * PAIRS * 2
    if lam == "adaptive":
        lam = length_adaptive_lambda(torch.full((responses,), length), ALPHA)
    advantages, _ = decoupled_gae(
        rewards,
        values + error * errors,
        torch.arange(responses + 1) * length,
        lambda_actor=lam,
        lambda_critic=lam,
    )
    return advantages.view(CRITICS, PAIRS, 2, length)[..., 0]


def bias_and_variance(length, lam, error=ERROR):
    advantages = first_advantages(length, lam, error)
    contrast = (advantages[..., 0] - advantages[..., 1]).mean(1)
    bias = (contrast - 2 / math.sqrt(length)).square().mean().sqrt()
    return float(bias), float(advantages.var(1).mean())


@pytest.fixture(scope="module")
def measured():
    """{(length, lambda): (bias, variance)}."""
    lambdas = (0.0, 0.95, "adaptive", 1.0)
    return {(n, lam): bias_and_variance(n, lam) for n in (SHORT, EVEN, LONG) for lam in lambdas}


def in_order(*numbers, by):
    """Each is larger than the one before it by this factor at least."""
    return all(larger > by * smaller for smaller, larger in zip(numbers, numbers[1:]))


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_with_exact_values_no_lambda_is_biased(length, lam):
    # A_0 = sum_k lambda^k x_k with x_k = +-1/sqrt(l); the first is given, so that its variance is
    # sum_{k=1}^{l-1} lambda^2k / l. Measured on 512 pairs: a relative error of sqrt(2/512) = 6%.
    bias, variance = bias_and_variance(length, lam, error=0.0)
    assert bias < 1e-12
    expected = math.fsum(lam ** (2 * k) for k in range(1, length)) / length
    assert variance == pytest.approx(expected, rel=0.2, abs=1e-20)


@pytest.mark.parametrize("length", [SHORT, LONG])
def test_lambda_1_is_unbiased_under_any_critic_and_has_the_whole_rewards_variance(measured, length):
    bias, variance = measured[length, 1.0]
    assert bias < 1e-12
    assert variance == pytest.approx(1, rel=0.2)


def test_lambda_0_is_as_wrong_as_the_critic_of_the_next_state():
    # delta(up) - delta(down) = 2/sqrt(l) + ERROR * (table[1, up] - table[1, down])
    advantages, table = first_advantages(SHORT, 0.0, ERROR), chain(SHORT)[3]
    contrast = advantages[..., 0] - advantages[..., 1] - 2 / math.sqrt(SHORT)
    wrong = ERROR * (table[:, 1, 1] - table[:, 1, -1]).double()
    torch.testing.assert_close(contrast, wrong.unsqueeze(1).expand(-1, PAIRS))


def test_short_chains(measured):
    # adaptive: lambda .8, five tokens; .95: twenty
    one, fixed, adaptive, zero = (measured[SHORT, x] for x in (1.0, 0.95, "adaptive", 0.0))
    assert in_order(one[0], fixed[0], adaptive[0], zero[0], by=1.8)
    assert in_order(zero[1], adaptive[1], fixed[1], one[1], by=2)


def test_long_chains(measured):
    # adaptive: lambda .99, a hundred tokens; .95: twenty
    one, adaptive, fixed, zero = (measured[LONG, x] for x in (1.0, "adaptive", 0.95, 0.0))
    assert in_order(one[0], adaptive[0], fixed[0], zero[0], by=1.8)
    assert in_order(zero[1], fixed[1], adaptive[1], one[1], by=2)


def test_in_between_they_are_one(measured):
    # 1 - 1/(.05 * 400) = .95
    assert measured[EVEN, "adaptive"] == pytest.approx(measured[EVEN, 0.95], rel=1e-9)


def test_longer_chains_cost_a_fixed_lambda_signal_and_adaptive_none():
    # A critic that knows nothing, V = 0, reward 1: token t has lambda^(l-1-t), on average
    # (1 - lambda^l) / (l (1 - lambda)): 1/.05 = 20 tokens' worth, and alpha * l.
    shares = {}
    for length in (SHORT, EVEN, LONG):
        rewards = torch.zeros(length, dtype=torch.float64)
        rewards[-1] = 1
        bounds = torch.tensor([0, length])
        for name, lam in (
            ("fixed", 0.95),
            ("adaptive", length_adaptive_lambda(torch.tensor([length]), ALPHA)),
            ("one", 1.0),
        ):
            advantages, _ = decoupled_gae(
                rewards, torch.zeros_like(rewards), bounds, lambda_actor=lam
            )
            shares[length, name] = float(advantages.mean())
    for length in (SHORT, EVEN, LONG):
        assert shares[length, "fixed"] == pytest.approx(20 / length, rel=0.01)
        assert shares[length, "adaptive"] == pytest.approx(0.05, rel=1e-6)
        assert shares[length, "one"] == 1

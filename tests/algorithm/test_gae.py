"""Decoupled and length-adaptive GAE against numbers by hand and against float64 loops.

Not exercised: a GPU (the same code, with one slice in place of many); how many operations it takes
(test_gae_operations.py) and how long (test_benchmark.py).
"""

import pytest
import torch

from tests import reference
from vapo_megatron.algorithm.gae import (
    decoupled_gae,
    gae_lengths,
    length_adaptive_lambda,
    resolve_lambdas,
)
from vapo_megatron.algorithm.segmented_scan import CPU_SLICE_TOKENS, ROW, SMALLEST_DECAY


def bounds_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def batch(lengths, *, dense_rewards=True, seed=0, dtype=torch.float32):
    """Random rewards and values for responses of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    rewards = torch.randn(total, generator=generator, dtype=dtype)
    values = torch.randn(total, generator=generator, dtype=dtype)
    cu_seqlens = bounds_of(lengths)
    if not dense_rewards:
        rewards = torch.zeros_like(rewards)
        rewards[cu_seqlens[1:].long() - 1] = 1.0
    return rewards, values, cu_seqlens


def assert_matches_loop(lengths, lam, gamma=1.0, dtype=torch.float32, tolerance=1e-6):
    """Advantages equal the loop's within tolerance of max|A|."""
    rewards, values, cu_seqlens = batch(lengths, dtype=dtype)
    advantages, _ = decoupled_gae(
        rewards, values, cu_seqlens, lambda_actor=lam, lambda_critic=0.5, gamma=gamma
    )
    lam_list = lam.tolist() if isinstance(lam, torch.Tensor) else lam
    expected = torch.tensor(
        reference.gae(rewards.tolist(), values.tolist(), cu_seqlens.tolist(), lam_list, gamma),
        dtype=torch.float64,
    )
    error = (advantages.double() - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"{error:.1e} of max|A|"


def test_golden_numbers():
    # Response 1: r = (0, 0, 1), V = (.5, .25, .75), gamma = 1
    #   delta = (0+.25-.5, 0+.75-.25, 1-.75) = (-.25, .5, .25)
    #   lambda_actor .5: A_3 = .25; A_2 = .5 + .5*.25 = .625; A_1 = -.25 + .5*.625 = .0625
    #   returns, lambda_critic 1: the sum of the rewards to come, 1 everywhere
    # Response 2: r = (-1), V = (.5): A = -1.5, return -1
    advantages, returns = decoupled_gae(
        torch.tensor([0.0, 0.0, 1.0, -1.0]),
        torch.tensor([0.5, 0.25, 0.75, 0.5]),
        torch.tensor([0, 3, 4], dtype=torch.int32),
        lambda_actor=0.5,
    )
    assert advantages.tolist() == [0.0625, 0.625, 0.25, -1.5]
    assert returns.tolist() == [1.0, 1.0, 1.0, -1.0]


def test_golden_numbers_with_discount_and_two_lambdas():
    # r = (1, 2), V = (4, 8), gamma = .5: delta = (1 + .5*8 - 4, 2 - 8) = (1, -6)
    #   actor, lambda .5: A_2 = -6; A_1 = 1 + .5*.5*(-6) = -.5
    #   critic, lambda .25: A_2 = -6; A_1 = 1 + .5*.25*(-6) = .25; returns = A + V = (4.25, 2)
    advantages, returns = decoupled_gae(
        torch.tensor([1.0, 2.0]),
        torch.tensor([4.0, 8.0]),
        torch.tensor([0, 2], dtype=torch.int32),
        lambda_actor=0.5,
        lambda_critic=0.25,
        gamma=0.5,
    )
    assert advantages.tolist() == [-0.5, -6.0]
    assert returns.tolist() == [4.25, 2.0]


LENGTHS = [
    [1],
    [2, 1, 1],
    [ROW],
    [ROW - 1, 1, ROW + 1],
    [3 * ROW, 2 * ROW, 1, ROW],
    [0, 5, 0, 0, 70, 1, 0],
    [700, 1, 33, 2048, 5, 999],
    [1] * 200,
    [CPU_SLICE_TOKENS + 3, 17],
]


def test_equals_the_loop(subtests):
    for lengths in LENGTHS:
        for lam in [0.0, 0.3, 0.95, 1.0]:
            with subtests.test(lengths=lengths, lam=lam):
                assert_matches_loop(lengths, lam)


def test_every_decay_is_finite_and_equals_the_loop(subtests):
    decays = (1e-300, 1e-40, 1e-12, SMALLEST_DECAY / 2, SMALLEST_DECAY, 1e-8, 1e-3, 0.5, 1 - 1e-9)
    for decay in (*decays, 1.0):
        for lam, gamma in ((1.0, decay), (decay, 1.0)):
            with subtests.test(lam=lam, gamma=gamma):
                assert_matches_loop([5 * ROW + 7, 3, 400], lam, gamma, torch.float64, 2e-9)


def test_mixed_lambdas_from_0_to_1_do_not_disturb_each_other():
    lams = torch.tensor([0.0, 1.0, 1e-200, 0.5, 1.0, 0.0, 0.99878], dtype=torch.float64)
    assert_matches_loop([90, 200, 64, 1, 0, 333, 1500], lams, dtype=torch.float64, tolerance=1e-12)


def test_length_adaptive_batch_of_long_responses():
    # 1/(1 - lambda) = 819 at the longest; float32 accumulation over 16384 tokens loses about 1e-5.
    lengths = [16384, 12000, 20, 21, 1, 5000, 3]
    lams = length_adaptive_lambda(torch.tensor(lengths), 0.05)
    assert_matches_loop(lengths, lams, tolerance=1e-7)


def test_values_ten_thousand_times_the_rewards():
    lengths = [4096, 300]
    rewards, values, cu_seqlens = batch(lengths)
    values = values * 1e4
    advantages, _ = decoupled_gae(rewards, values, cu_seqlens, lambda_actor=1.0)
    returns = reference.monte_carlo_returns(rewards.tolist(), cu_seqlens.tolist())
    expected = torch.tensor(returns, dtype=torch.float64) - values.double()
    torch.testing.assert_close(advantages.double(), expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_lambda_1_is_monte_carlo_whatever_the_values(gamma):
    rewards, values, cu_seqlens = batch([700, 1, 0, 95])
    packed = rewards.tolist(), cu_seqlens.tolist()
    expected = torch.tensor(reference.monte_carlo_returns(*packed, gamma))
    results = [
        decoupled_gae(rewards, v, cu_seqlens, lambda_actor=0.3, gamma=gamma)[1]
        for v in (values, values * 1e30, torch.zeros_like(values))
    ]
    torch.testing.assert_close(results[0], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("lambda_actor", [0.3, 1.0])
def test_terminal_reward_returns_are_exactly_the_reward(lambda_actor):
    rewards, values, cu_seqlens = batch([16384, 3, 77], dense_rewards=False)
    rewards *= torch.tensor([0.1, -1.0, 1.0]).repeat_interleave(cu_seqlens.diff())
    _, returns = decoupled_gae(rewards, values, cu_seqlens, lambda_actor=lambda_actor)
    expected = torch.tensor([0.1, -1.0, 1.0]).repeat_interleave(cu_seqlens.diff())
    assert torch.equal(returns, expected)


@pytest.mark.parametrize("per_response", [False, True])
def test_lambda_0_is_the_temporal_difference(per_response):
    rewards, values, cu_seqlens = batch([300, 2, 1, 64])
    lam = torch.zeros(4) if per_response else 0.0
    advantages, returns = decoupled_gae(
        rewards, values, cu_seqlens, lambda_actor=lam, lambda_critic=0.0, gamma=0.5
    )
    following = torch.cat([values[1:], torch.zeros(1)]).double()
    following[cu_seqlens[1:].long() - 1] = 0
    target = rewards.double() + 0.5 * following
    assert torch.equal(advantages, (target - values.double()).float())
    torch.testing.assert_close(returns, target.float(), rtol=1e-6, atol=1e-7)


def test_lambda_0_leaves_exact_zeros_where_nothing_happens():
    rewards, _, cu_seqlens = batch([500, 40], dense_rewards=False)
    advantages, _ = decoupled_gae(
        rewards, torch.zeros(540), cu_seqlens, lambda_actor=torch.zeros(2)
    )
    assert torch.equal(advantages, rewards)


@pytest.mark.parametrize("lam", [0.7, 1.0])
def test_equal_lambdas_give_what_two_computations_give(lam):
    rewards, values, cu_seqlens = batch([300, 200], dtype=torch.float64)
    lams = torch.tensor([lam, lam], dtype=torch.float64)
    for once in (lam, lams):
        a, g = decoupled_gae(rewards, values, cu_seqlens, lambda_actor=once, lambda_critic=once)
        b, h = decoupled_gae(
            rewards, values, cu_seqlens, lambda_actor=lams, lambda_critic=lams.clone()
        )
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        torch.testing.assert_close(g, h, rtol=0, atol=1e-12)


def test_a_response_does_not_see_its_neighbours():
    rewards, values, cu_seqlens = batch([50, 50, 50])
    other_rewards, other_values = rewards.clone(), values.clone()
    for neighbour in (slice(0, 50), slice(100, 150)):
        other_rewards[neighbour] = 1e12
        other_values[neighbour] = -1e12
    one = decoupled_gae(rewards, values, cu_seqlens, lambda_actor=0.9)
    other = decoupled_gae(other_rewards, other_values, cu_seqlens, lambda_actor=0.9)
    for a, b in zip(one, other):
        assert torch.equal(a[50:100], b[50:100])


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_to_do(lengths):
    empty = torch.zeros(0)
    for lam in (0.5, 1.0, torch.zeros(len(lengths))):
        advantages, returns = decoupled_gae(empty, empty, bounds_of(lengths), lambda_actor=lam)
        assert advantages.shape == returns.shape == (0,)


def test_inputs_are_left_alone_and_results_carry_no_graph():
    for dtype in (torch.float32, torch.float64):
        for lambda_critic in (1.0, 0.5):
            rewards, values, cu_seqlens = batch([70, 3], dtype=dtype)
            copies = rewards.clone(), values.clone()
            advantages, returns = decoupled_gae(
                rewards,
                values.requires_grad_(),
                cu_seqlens,
                lambda_actor=0.5,
                lambda_critic=lambda_critic,
            )
            assert torch.equal(rewards, copies[0]) and torch.equal(values, copies[1])
            assert not advantages.requires_grad and not returns.requires_grad
            assert advantages.dtype == returns.dtype == dtype


def test_length_adaptive_lambda_golden_numbers():
    # alpha .05: .05*20 = 1 -> 0; .05*100 = 5 -> 1 - 1/5; .05*400 = 20 -> 1 - 1/20; 50; 250; 819.2
    lengths = torch.tensor([0, 1, 19, 20, 100, 400, 1000, 5000, 16384])
    expected = [0, 0, 0, 0, 0.8, 0.95, 0.98, 0.996, 1 - 1 / 819.2]
    assert length_adaptive_lambda(lengths, 0.05).tolist() == pytest.approx(expected, abs=1e-15)


def test_numbers_that_other_implementations_give():
    # alpha 1: 1 - 1/4, 1 - 1/2, and 0 for no tokens. alpha .4 and l = 3: lambda = 1 - 1/1.2 = 1/6;
    # delta = (.3, .3, .2): A_3 = .2, A_2 = .3 + .2/6 = .33333, A_1 = .3 + .33333/6 = .35556
    assert length_adaptive_lambda(torch.tensor([4, 2, 0]), 1.0).tolist() == [0.75, 0.5, 0]
    lams = length_adaptive_lambda(torch.tensor([3]), 0.4)
    advantages, returns = decoupled_gae(
        torch.tensor([0.0, 0.0, 1.0]),
        torch.tensor([0.2, 0.5, 0.8]),
        torch.tensor([0, 3]),
        lambda_actor=lams,
    )
    assert advantages.tolist() == pytest.approx([0.35556, 0.33333, 0.2], abs=5e-6)
    assert returns.tolist() == [1, 1, 1]


def test_gae_lengths():
    # Responses of 4, 3, 0 and 2 tokens; of the first one token is masked, the last one wholly.
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 0]).bool()
    bounds = bounds_of([4, 3, 0, 2])
    for weights in (mask, mask * 0.5):
        assert gae_lengths(weights, bounds, "response").tolist() == [4, 3, 0, 2]
        actions = gae_lengths(weights, bounds, "action")
        assert actions.tolist() == [3, 3, 0, 0] and actions.dtype == torch.int64
    assert length_adaptive_lambda(actions, 1.0).tolist() == pytest.approx([2 / 3, 2 / 3, 0, 0])
    with pytest.raises(ValueError, match="gae_length='token' must be"):
        gae_lengths(mask, bounds, "token")
    with pytest.raises(ValueError, match="loss_mask.dtype=torch.int64"):
        gae_lengths(mask.long(), bounds, "action")


def test_resolve_lambdas():
    lengths = torch.tensor([100, 400])
    actor, critic = resolve_lambdas(
        lengths, lambda_actor="adaptive", lambda_critic=1.0, length_adaptive_alpha=0.05
    )
    assert actor.tolist() == pytest.approx([0.8, 0.95]) and critic == 1.0
    actor, critic = resolve_lambdas(
        lengths, lambda_actor=0.95, lambda_critic="same_as_actor", length_adaptive_alpha=0.05
    )
    assert actor == critic == 0.95
    actor, critic = resolve_lambdas(
        lengths, lambda_actor="adaptive", lambda_critic="same_as_actor", length_adaptive_alpha=0.05
    )
    assert actor is critic
    for name in ("lambda_actor", "lambda_critic"):
        arguments = {"lambda_actor": 1.0, "lambda_critic": 1.0} | {name: "off"}
        with pytest.raises(ValueError, match=f"{name}='off'"):
            resolve_lambdas(lengths, **arguments, length_adaptive_alpha=0.05)


def refused(match, **changes):
    arguments = {
        "token_rewards": torch.zeros(3),
        "values": torch.zeros(3),
        "cu_seqlens": torch.tensor([0, 1, 3]),
        "lambda_actor": 0.5,
    }
    decoupled_gae(**arguments)
    with pytest.raises(ValueError, match=match):
        decoupled_gae(**(arguments | changes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_narrow_dtypes_are_refused_by_name(dtype):
    name = str(dtype)
    refused(f"token_rewards.dtype={name}", token_rewards=torch.zeros(3, dtype=dtype))
    refused(f"values.dtype={name}", values=torch.zeros(3, dtype=dtype))
    refused(f"lambda_actor.dtype={name}", lambda_actor=torch.zeros(2, dtype=dtype))
    refused(f"lambda_critic.dtype={name}", lambda_critic=torch.zeros(2, dtype=dtype))
    if dtype.is_floating_point:
        with pytest.raises(ValueError, match=f"lengths.dtype={name}"):
            length_adaptive_lambda(torch.ones(3, dtype=dtype), 0.05)


def test_arguments_that_do_not_belong_together_are_refused():
    refused(r"values.shape=\(4,\)", values=torch.zeros(4))
    refused(r"lambda_actor.shape=\(3,\)", lambda_actor=torch.zeros(3))
    refused("lambda_actor=1.5", lambda_actor=1.5)
    refused("lambda_critic=-1", lambda_critic=-1)
    refused("gamma=1.1", gamma=1.1)
    refused("cu_seqlens runs from 0 to 2", cu_seqlens=torch.tensor([0, 2]))
    refused("cu_seqlens runs from 1 to 3", cu_seqlens=torch.tensor([1, 3]))
    refused("cu_seqlens", cu_seqlens=torch.tensor([0.0, 3.0]))
    with pytest.raises(ValueError, match="length_adaptive_alpha=0"):
        length_adaptive_lambda(torch.ones(3), 0)

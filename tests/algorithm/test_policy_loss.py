"""Clipped policy loss, its metrics and aggregation weights: by hand, against loops and autograd.

Not exercised: the division by counts that really were all-reduced over ranks (tests/distributed).
"""

import math

import pytest
import torch

from tests import reference
from vapo_megatron.algorithm.policy_loss import (
    clipped_policy_loss,
    loss_count,
    ratio_difference,
    token_weights,
)

CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


def batch(num_tokens=200, seed=0, dtype=torch.float64):
    """(logprobs, old_logprobs, advantages, mask); a third of the ratios leave the clips."""
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages = torch.randn(3, num_tokens, generator=generator, dtype=dtype)
    mask = torch.rand(num_tokens, generator=generator) < 0.8
    return old - 1 + 0.4 * new, old - 1, advantages, mask


def lists(*tensors):
    return [t.double().tolist() for t in tensors]


def test_golden_numbers():
    # ratio 1.5, A 2: min(3, 1.28 * 2 = 2.56) = 2.56, clipped high
    # ratio 0.5, A -1: min(-.5, .8 * -1) = -.8, clipped low
    # ratio 1.5, A -1: min(-1.5, -1.28) = -1.5, the unclipped side
    # ratio 0.5, A 2: min(1, 1.6) = 1, the unclipped side
    # ratio 1.1, A 10: 11, within; a fifth token is masked out
    # loss = -(2.56 - .8 - 1.5 + 1) / 8 = -1.26 / 8 = -.1575 with N = 8 of the whole mini-batch
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.1], dtype=torch.float64)
    loss, metrics = clipped_policy_loss(
        ratio.log(),
        torch.zeros(5, dtype=torch.float64),
        torch.tensor([2.0, -1.0, -1.0, 2.0, 10.0], dtype=torch.float64),
        torch.tensor([True, True, True, True, False]),
        **CLIPS,
        num_tokens=8,
    )
    assert loss.item() == pytest.approx(-0.1575, abs=1e-15)
    # k3 = ratio - 1 - log(ratio): .5 - log 1.5 and -.5 + log 2, twice each; their sum over 8
    assert float(metrics["approx_kl"]) == pytest.approx(
        2 * (-math.log(1.5) + math.log(2)) / 8, abs=1e-15
    )
    assert float(metrics["clip_fraction_low"]) == 1 / 8
    assert float(metrics["clip_fraction_high"]) == 1 / 8
    assert set(metrics) == {"approx_kl", "clip_fraction_low", "clip_fraction_high"}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("count", [160, 1000])
def test_value_and_gradient_equal_the_loop(weighted, count):
    new, old, advantages, mask = batch()
    weights = mask * torch.rand(200, dtype=torch.float64) if weighted else mask
    new.requires_grad_()
    loss, _ = clipped_policy_loss(new, old, advantages, weights, **CLIPS, num_tokens=count)
    loss.backward()
    arguments = lists(new.detach(), old, advantages, weights)
    expected, gradient = reference.policy_loss(*arguments, **CLIPS, count=count)
    assert loss.item() == pytest.approx(expected, abs=1e-14)
    torch.testing.assert_close(new.grad.tolist(), gradient, rtol=0, atol=1e-15)
    numeric = reference.numerical_gradient(
        lambda x: reference.policy_loss(x, *arguments[1:], **CLIPS, count=count)[0], arguments[0]
    )
    torch.testing.assert_close(new.grad.tolist(), numeric, rtol=0, atol=1e-9)


def test_float32_is_close_to_float64():
    wide, narrow = batch(), batch()
    narrow = [x.float() if x.is_floating_point() else x for x in narrow]
    a, _ = clipped_policy_loss(*wide, **CLIPS, num_tokens=160)
    b, _ = clipped_policy_loss(*narrow, **CLIPS, num_tokens=160)
    assert b.dtype == torch.float32
    assert float(b) == pytest.approx(float(a), abs=1e-6)


def test_small_kl_keeps_its_digits_in_float32():
    # k3 at log ratio d is d^2/2 + d^3/6; at 1e-4, ratio - 1 - log(ratio) in float32 keeps no digit.
    new, old = torch.full((10,), 1e-4), torch.zeros(10)
    mask = torch.ones(10, dtype=torch.bool)
    _, metrics = clipped_policy_loss(new, old, old, mask, **CLIPS, num_tokens=10)
    assert float(metrics["approx_kl"]) == pytest.approx(5e-9, rel=0.01)


def test_ratio_difference():
    # Ratios 1.5, .25 and, of weight .5, 1.1 (NaN is masked out), of 4 tokens of a mini-batch.
    new = torch.tensor([1.5, 0.25, 1.1, math.nan]).log()
    mask = torch.tensor([1.0, 1.0, 0.5, 0.0])
    found = ratio_difference(new, torch.zeros(4), mask, high=0.3, num_tokens=4)
    expected = {
        "ratio_diff_mean": (0.5 + 0.75 + 0.1) / 4,
        "ratio_diff_high_fraction": 2 / 4,
        "ratio_diff_max": 0.75,
    }
    assert {name: float(value) for name, value in found.items()} == pytest.approx(expected)
    empty = ratio_difference(new[:0], new[:0], mask[:0], high=0.3, num_tokens=0)
    assert all(float(value) == 0 for value in empty.values())


BOUNDS = torch.tensor([0, 4, 4, 6, 9], dtype=torch.int32)
MASK = torch.tensor([1, 1, 0, 1, 1, 1, 0, 0, 0]).bool()


def test_token_weights():
    # masked lengths 3, 0 (empty), 2, 0 (wholly masked)
    assert token_weights(MASK, BOUNDS, "token").tolist() == MASK.float().tolist()
    sample = token_weights(MASK, BOUNDS, "sample")
    third = float(torch.tensor(1.0) / 3)
    assert sample.tolist() == [third, third, 0, third, 0.5, 0.5, 0, 0, 0]
    assert sample.dtype == torch.float32
    assert int(loss_count(MASK, BOUNDS, "token")) == 5
    assert int(loss_count(MASK, BOUNDS, "sample")) == 2


def test_constant_weights():
    # 1/8 whatever the length; the wholly masked and the empty response do not count
    constant = token_weights(MASK, BOUNDS, "constant", max_response_tokens=8)
    assert constant.dtype == torch.float32
    assert constant.tolist() == [0.125, 0.125, 0, 0.125, 0.125, 0.125, 0, 0, 0]
    assert int(loss_count(MASK, BOUNDS, "constant")) == 2
    halved = token_weights(MASK * 0.5, BOUNDS, "constant", max_response_tokens=8)
    assert halved.tolist() == (constant / 2).tolist()


@pytest.mark.parametrize("longest", [None, 0, -1])
def test_constant_needs_the_longest_response(longest):
    with pytest.raises(ValueError, match=f"max_response_tokens={longest} must be at least 1"):
        token_weights(MASK, BOUNDS, "constant", max_response_tokens=longest)


def test_float_weights_change_a_share_and_not_the_count():
    weights = MASK * torch.tensor([2.0, 0.5, 9, 1, 4, 1, 9, 9, 9])
    assert token_weights(weights, BOUNDS, "sample").tolist() == pytest.approx(
        [2 / 3, 0.5 / 3, 0, 1 / 3, 2, 0.5, 0, 0, 0]
    )
    assert int(loss_count(weights, BOUNDS, "token")) == 5
    assert int(loss_count(weights, BOUNDS, "sample")) == 2


@pytest.mark.parametrize("aggregation", ["token", "sample", "constant"])
def test_metrics_are_of_tokens_whatever_the_weights(aggregation):
    # Of the five trained tokens two have a ratio of e and A > 0, one a ratio of 1/e and A < 0.
    new = torch.tensor([1.0, 1, 9, 0, -1, 0, 9, 9, 9])
    advantages = torch.tensor([1.0, 1, 1, 1, -1, 1, 1, 1, 1])
    weights = MASK * torch.tensor([2.0, 0.5, 9, 1, 4, 1, 9, 9, 9])
    _, metrics = clipped_policy_loss(
        new,
        torch.zeros(9),
        advantages,
        token_weights(weights, BOUNDS, aggregation, max_response_tokens=8),
        **CLIPS,
        num_tokens=loss_count(weights, BOUNDS, aggregation),
        num_trained_tokens=loss_count(weights, BOUNDS, "token"),
    )
    assert float(metrics["clip_fraction_high"]) == pytest.approx(2 / 5)
    assert float(metrics["clip_fraction_low"]) == pytest.approx(1 / 5)
    # 2 (e - 2) + 1/e of k3
    assert float(metrics["approx_kl"]) == pytest.approx((2 * math.e - 4 + 1 / math.e) / 5)


def test_sample_level_loss_is_the_mean_of_the_responses_means():
    lengths = [3, 50, 1]
    new, old, advantages, _ = batch(54)
    mask = torch.ones(54, dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 3, 53, 54])
    loss, _ = clipped_policy_loss(
        new,
        old,
        advantages,
        token_weights(mask, cu_seqlens, "sample"),
        **CLIPS,
        num_tokens=loss_count(mask, cu_seqlens, "sample"),
    )
    means = []
    for lo, length in zip([0, 3, 53], lengths):
        part = lists(*[x[lo : lo + length] for x in (new, old, advantages)])
        means.append(reference.policy_loss(*part, [1.0] * length, **CLIPS, count=length)[0])
    assert loss.item() == pytest.approx(sum(means) / 3, abs=1e-7)


def test_no_responses():
    empty = torch.zeros(0, dtype=torch.bool)
    for aggregation in ("token", "sample", "constant"):
        weights = token_weights(empty, torch.zeros(1).int(), aggregation, max_response_tokens=1)
        assert weights.shape == (0,)
        assert int(loss_count(empty, torch.zeros(1).int(), aggregation)) == 0


def test_bad_settings_are_refused():
    for clips in ({"clip_low": -0.1}, {"clip_low": 1.1}, {"clip_high": -0.1}):
        with pytest.raises(ValueError, match=f"{next(iter(clips))}="):
            clipped_policy_loss(*batch(4), **(CLIPS | clips), num_tokens=4)
    for function in (token_weights, loss_count):
        with pytest.raises(ValueError, match="loss_aggregation='mean'"):
            function(MASK, BOUNDS, "mean")
        with pytest.raises(ValueError, match="loss_mask.dtype=torch.bfloat16"):
            function(MASK.bfloat16(), BOUNDS, "token")

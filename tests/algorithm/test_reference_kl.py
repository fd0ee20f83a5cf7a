"""The KL loss against a reference: by hand, against a loop, finite differences and the true KL.

Not exercised: a reference model (tests of the models).
"""

import math

import pytest
import torch

from tests import reference
from vapo_megatron.algorithm.reference_kl import reference_kl


def batch(num_tokens=100):
    """(logprobs, reference_logprobs, mask), float64."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, num_tokens, generator=generator, dtype=torch.float64)
    return a - 2, b - 2, torch.rand(num_tokens, generator=generator) < 0.8


@pytest.mark.parametrize("dtype,digits", [(torch.float64, 1e-15), (torch.float32, 1e-7)])
def test_golden_numbers(dtype, digits):
    # reference/policy 2: 2 - log 2 - 1;  1/2: 1/2 + log 2 - 1;  1: 0;  the last is masked out
    # their sum is 1/2, over N = 4: 1/8;  gradients (1 - ratio) / 4: -1/4, 1/8, 0
    policy = torch.zeros(4, dtype=dtype, requires_grad=True)
    ratios = torch.tensor([2.0, 0.5, 1.0, 9.0], dtype=dtype)
    mask = torch.tensor([True, True, True, False])
    loss, metrics = reference_kl(policy, ratios.log(), mask, num_tokens=4)
    loss.backward()
    assert loss.item() == pytest.approx(0.125, abs=digits)
    assert policy.grad.tolist() == pytest.approx([-0.25, 0.125, 0, 0], abs=digits)
    assert {k: float(v) for k, v in metrics.items()} == {
        "reference_kl": loss.item(), "reference_kl_tangent_fraction": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradient_equal_the_loop(weighted):
    policy, other, mask = batch()
    weights = mask * torch.rand(100, dtype=torch.float64) if weighted else mask.double()
    policy.requires_grad_()
    loss, _ = reference_kl(policy, other, weights if weighted else mask, num_tokens=70)
    loss.backward()

    def loop(x):
        return reference.reference_kl(x, other.tolist(), weights.tolist(), count=70)

    expected, slopes = loop(policy.tolist())
    assert loss.item() == pytest.approx(expected, abs=1e-14)
    torch.testing.assert_close(policy.grad.tolist(), slopes, rtol=0, atol=1e-14)
    numeric = reference.numerical_gradient(lambda x: loop(x)[0], policy.tolist())
    torch.testing.assert_close(slopes, numeric, rtol=0, atol=1e-8)


def test_its_expectation_over_the_policys_tokens_is_the_kl():
    # Each token of a vocabulary of 50 once, weighed by the policy's probability.
    policy, other = torch.randn(2, 50, dtype=torch.float64).log_softmax(-1)
    loss, _ = reference_kl(policy, other, policy.exp(), num_tokens=1)
    true = sum(math.exp(p) * (p - q) for p, q in zip(policy.tolist(), other.tolist()))
    assert loss.item() == pytest.approx(true, abs=1e-13)


def test_small_distances_keep_their_digits_in_float32():
    # d^2 / 2 at d = 1e-4; exp(d) - d - 1 in float32 keeps no digit
    policy, mask = torch.zeros(10), torch.ones(10, dtype=torch.bool)
    loss, _ = reference_kl(policy, policy + 1e-4, mask, num_tokens=10)
    assert loss.item() == pytest.approx(5e-9, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_beyond_20_the_tangent(dtype):
    # at d = 20 + x: e^20 (1 + x) - (20 + x) - 1, gradient 1 - e^20 throughout
    distance = torch.tensor([20.0, 21.0, 120.0, 1e4], dtype=dtype)
    policy = torch.zeros(4, dtype=dtype, requires_grad=True)
    for index, d in enumerate(distance.tolist()):
        part = slice(index, index + 1)
        mask = torch.ones(1, dtype=torch.bool)
        loss, metrics = reference_kl(policy[part], distance[part], mask, num_tokens=1)
        loss.backward()
        expected = math.exp(20) * (1 + d - 20) - d - 1
        digits = 1e-14 if dtype == torch.float64 else 1e-6
        assert loss.item() == pytest.approx(expected, rel=digits)
        assert float(metrics["reference_kl_tangent_fraction"]) == (d > 20)
    assert policy.grad.tolist() == pytest.approx([1 - math.exp(20)] * 4, rel=1e-6)


def test_far_below_the_gradient_is_one():
    # d = -1e4: -d - 1 = 9999, gradient 1 - e^-10000 = 1
    policy = torch.zeros(1, requires_grad=True)
    loss, _ = reference_kl(policy, policy.detach() - 1e4, torch.ones(1).bool(), num_tokens=1)
    loss.backward()
    assert loss.item() == 9999 and policy.grad.item() == 1


def test_an_impossible_token_is_not_hidden():
    policy, impossible = torch.zeros(1, requires_grad=True), torch.full((1,), -math.inf)
    loss, _ = reference_kl(policy, impossible, torch.ones(1).bool(), num_tokens=1)
    loss.backward()
    assert loss.item() == math.inf and policy.grad.item() == 1


def test_no_gradient_passes_into_the_reference():
    policy, other, mask = batch(5)
    other.requires_grad_()
    loss, _ = reference_kl(policy.requires_grad_(), other, mask, num_tokens=5)
    loss.backward()
    assert other.grad is None

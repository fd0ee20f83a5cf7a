"""Positive-example LM loss by hand, against the loop and autograd.

Not exercised: the verdicts (tests/reward) and the coefficient mu, which the actor applies.
"""

import pytest
import torch

from tests import reference
from vapo_megatron.algorithm.positive_lm_loss import imitation_weights, positive_lm_loss


def test_golden_numbers():
    # correct and unmasked: -1 and -3; the others (masked: -9, wrong: -5) stay out
    # loss = (1 + 3) / 8 = .5; gradient -1/8 where they stand
    logprobs = torch.tensor([-1.0, -9.0, -5.0, -3.0], requires_grad=True)
    loss = positive_lm_loss(
        logprobs,
        torch.tensor([True, False, True, True]),
        torch.tensor([True, True, False, True]),
        num_positive_tokens=8,
    )
    loss.backward()
    assert loss.item() == 0.5
    assert logprobs.grad.tolist() == [-0.125, 0.0, 0.0, -0.125]


def test_self_imitation_by_hand():
    # R - V = .5, -1, 2 and 1: max(., 0) = .5, 0, 2, 1; the last is wrong, and the count stays 4:
    # loss = (.5 * 1 + 0 * 2 + 2 * 3) / 4 = 1.625; gradient -w / 4
    returns = torch.tensor([1.0, -1.0, 1.0, 1.0])
    values = torch.tensor([0.5, 0.0, -1.0, 0.0], requires_grad=True)
    logprobs = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    loss = positive_lm_loss(
        logprobs,
        torch.ones(4, dtype=torch.bool),
        torch.tensor([True, True, True, False]),
        num_positive_tokens=4,
        weights=imitation_weights(returns, values),
    )
    loss.backward()
    assert loss.item() == 1.625
    assert logprobs.grad.tolist() == [-0.125, 0.0, -0.5, 0.0]
    assert values.grad is None
    with pytest.raises(ValueError, match="values.dtype"):
        imitation_weights(returns, values.bfloat16())


def test_equals_the_loop():
    logprobs = -torch.rand(50, dtype=torch.float64)
    weights = torch.rand(50, dtype=torch.float64) * (torch.rand(50) < 0.8)
    correct = torch.rand(50) < 0.5
    expected = reference.positive_lm_loss(
        logprobs.tolist(), weights.tolist(), correct.tolist(), count=19
    )
    loss = positive_lm_loss(logprobs, weights, correct, num_positive_tokens=19)
    assert loss.item() == pytest.approx(expected, abs=1e-14)

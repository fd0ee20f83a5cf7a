"""Truncated responses carry no loss, by hand.

Not exercised: the sampler that says which are truncated (tests/rollout).
"""

import pytest
import torch

from vapo_megatron.algorithm.overlong_filtering import without_truncated
from vapo_megatron.algorithm.policy_loss import clipped_policy_loss, loss_count, token_weights

# responses of 2, 0, 3 and 1 tokens
BOUNDS = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32)
TRUNCATED = torch.tensor([False, True, True, False])


def test_truncated_responses_are_masked_out():
    mask = torch.tensor([1, 0, 1, 1, 1, 1]).bool()
    filtered = without_truncated(mask, TRUNCATED, BOUNDS)
    assert filtered.dtype == torch.bool
    assert filtered.tolist() == [True, False, False, False, False, True]
    assert mask.tolist() == [True, False, True, True, True, True]
    weights = torch.tensor([0.5, 0, 1, 1, 1, 2])
    filtered = without_truncated(weights, TRUNCATED, BOUNDS)
    assert filtered.dtype == torch.float32 and filtered.tolist() == [0.5, 0, 0, 0, 0, 2]


def test_none_and_all():
    mask = torch.ones(6, dtype=torch.bool)
    assert torch.equal(without_truncated(mask, torch.zeros(4).bool(), BOUNDS), mask)
    assert not without_truncated(mask, torch.ones(4).bool(), BOUNDS).any()
    empty = torch.zeros(0, dtype=torch.bool)
    assert without_truncated(empty, empty, torch.zeros(1).int()).shape == (0,)


@pytest.mark.parametrize("aggregation,count", [("token", 3), ("sample", 2), ("constant", 2)])
def test_they_leave_loss_and_denominator(aggregation, count):
    mask = without_truncated(torch.ones(6, dtype=torch.bool), TRUNCATED, BOUNDS)
    weights = token_weights(mask, BOUNDS, aggregation, max_response_tokens=3)
    number = loss_count(mask, BOUNDS, aggregation)
    assert int(number) == count
    new = torch.zeros(6, requires_grad=True)
    loss, _ = clipped_policy_loss(
        new, torch.zeros(6), torch.ones(6), weights, clip_low=0.2, clip_high=0.2, num_tokens=number
    )
    loss.backward()
    assert (new.grad != 0).tolist() == [True, True, False, False, False, True]


def test_refusals():
    mask = torch.ones(6, dtype=torch.bool)
    for bad in (TRUNCATED[:3], TRUNCATED.long()):
        with pytest.raises(ValueError, match=r"truncated: shape .* must be \(B,\) = \(4,\) bool"):
            without_truncated(mask, bad, BOUNDS)
    with pytest.raises(ValueError, match="loss_mask.dtype=torch.bfloat16"):
        without_truncated(mask.bfloat16(), TRUNCATED, BOUNDS)

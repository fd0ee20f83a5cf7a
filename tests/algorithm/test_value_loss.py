"""Value loss and bounded values by hand, against the loop and finite differences.

Not exercised: the value head that makes the values (tests/models).
"""

import math

import pytest
import torch

from tests import reference
from vapo_megatron.algorithm.value_loss import ranged_values, value_loss


def batch(num_tokens=100):
    """(values, returns, mask, old_values), float64."""
    values, returns, old = torch.randn(3, num_tokens, dtype=torch.float64)
    return values, returns, torch.rand(num_tokens) < 0.8, old


def test_golden_numbers():
    # errors 1, -2, (masked) 5: .5 * (1 + 4) / 4 = .625;  means of V and R over 4: 3/4, 4/4
    loss, metrics = value_loss(
        torch.tensor([2.0, 1.0, 5.0]),
        torch.tensor([1.0, 3.0, 0.0]),
        torch.tensor([True, True, False]),
        num_tokens=4,
    )
    assert loss.item() == 0.625
    assert {k: float(v) for k, v in metrics.items()} == {
        "value_mean": 0.75, "return_mean": 1.0, "value_clip_fraction": 0.0,
    }  # fmt: skip


def test_golden_numbers_with_a_clip():
    # V 2, old 0, clip .5 -> .5; R 0: max(4, .25) = 4, unclipped
    # V 2, old 0, clip .5 -> .5; R 3: max(1, 6.25) = 6.25, clipped: no gradient
    # V 2, old 0, clip .5 -> .5; R 5: max(9, 20.25) = 20.25, clipped: no gradient
    # V 0.3, old 0 -> .3; R 0: .09
    # Gradients (V - R) / 4 = .5 and .075 where unclipped.
    values = torch.tensor([2.0, 2.0, 2.0, 0.3], dtype=torch.float64, requires_grad=True)
    loss, metrics = value_loss(
        values,
        torch.tensor([0.0, 3.0, 5.0, 0.0], dtype=torch.float64),
        torch.ones(4, dtype=torch.bool),
        num_tokens=4,
        old_values=torch.zeros(4, dtype=torch.float64),
        clip=0.5,
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (4 + 6.25 + 20.25 + 0.09) / 4)
    assert values.grad.tolist() == pytest.approx([0.5, 0.0, 0.0, 0.075])
    assert float(metrics["value_clip_fraction"]) == 2 / 4


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_and_gradient_equal_the_loop(clip):
    values, returns, mask, old = batch()
    weights = mask * torch.rand(100, dtype=torch.float64)
    values.requires_grad_()
    loss, _ = value_loss(values, returns, weights, num_tokens=70, old_values=old, clip=clip)
    loss.backward()
    rest = [returns.tolist(), weights.tolist()]
    settings = {"count": 70, "old_values": old.tolist(), "clip": clip}
    expected, gradient = reference.value_loss(values.tolist(), *rest, **settings)
    assert loss.item() == pytest.approx(expected, abs=1e-14)
    torch.testing.assert_close(values.grad.tolist(), gradient, rtol=0, atol=1e-15)
    numeric = reference.numerical_gradient(
        lambda x: reference.value_loss(x, *rest, **settings)[0], values.tolist()
    )
    torch.testing.assert_close(values.grad.tolist(), numeric, rtol=0, atol=1e-9)


def test_ranged_values_golden_numbers():
    # atan(1) = pi/4, atan(0) = 0, atan(-sqrt 3) = -pi/3: 1/2 + 1/4, 1/2, 1/2 - 1/3 of the range
    # [-1, 3]; slopes 4 / (pi (1 + z^2))
    head = torch.tensor([1.0, 0.0, -math.sqrt(3)], dtype=torch.float64, requires_grad=True)
    values = ranged_values(head, -1.0, 3.0)
    values.sum().backward()
    assert values.tolist() == pytest.approx([2, 1, -1 / 3], abs=1e-15)
    slopes = [2 / math.pi, 4 / math.pi, 1 / math.pi]
    assert head.grad.tolist() == pytest.approx(slopes, abs=1e-15)
    for z, value, slope in zip(head.tolist(), values.tolist(), slopes):
        assert reference.ranged_value(z, -1, 3) == pytest.approx((value, slope))


def test_ranged_values_never_leave_the_range():
    head = torch.tensor([-math.inf, -1e30, -1e5, 1e5, 1e30, math.inf])
    values = ranged_values(head, -1.0, 0.5)
    assert values.dtype == torch.float32
    assert bool((values >= -1).all() and (values <= 0.5).all())
    assert values.tolist() == pytest.approx([-1, -1, -1, 0.5, 0.5, 0.5], abs=1e-5)


@pytest.mark.parametrize("low,high", [(1.0, 1.0), (1.0, -1.0), (-math.inf, 1.0), (0.0, math.nan)])
def test_a_range_is_finite_and_not_empty(low, high):
    with pytest.raises(ValueError, match="value_range=.* must be finite with low below high"):
        ranged_values(torch.zeros(2), low, high)


def test_refusals():
    with pytest.raises(ValueError, match="head.dtype=torch.bfloat16"):
        ranged_values(torch.zeros(2, dtype=torch.bfloat16), 0.0, 1.0)
    values, returns, mask, _ = batch(4)
    with pytest.raises(ValueError, match="clip=0.2 needs old_values"):
        value_loss(values, returns, mask, num_tokens=4, clip=0.2)

"""What all losses have in common: sums over microbatches, masks, counts of 0, gradients, dtypes.

Each loss by hand and against its loop is in the file of its name. Not exercised: counts that really
were all-reduced over ranks (tests/distributed).
"""

import math
from functools import partial

import pytest
import torch

from vapo_megatron.algorithm.off_policy_loss import dis_policy_loss, dppo_tv_policy_loss
from vapo_megatron.algorithm.policy_loss import clipped_policy_loss
from vapo_megatron.algorithm.positive_lm_loss import positive_lm_loss
from vapo_megatron.algorithm.reference_kl import reference_kl
from vapo_megatron.algorithm.value_loss import value_loss


def imitation(*, num_tokens, **tensors):
    """Of correct responses' tokens; without metrics."""
    return positive_lm_loss(**tensors, num_positive_tokens=num_tokens), {}


SAMPLED = ("logprobs", "rollout_logprobs", "advantages", "loss_mask")
LOSSES = {
    "ppo_clip": (
        partial(clipped_policy_loss, clip_low=0.2, clip_high=0.28),
        ("logprobs", "old_logprobs", "advantages", "loss_mask"),
    ),
    "dis": (partial(dis_policy_loss, low=0.3, high=5.0), SAMPLED),
    "dppo_tv": (partial(dppo_tv_policy_loss, max_difference=0.15, ratio_cap=20.0), SAMPLED),
    "value": (value_loss, ("values", "returns", "loss_mask")),
    "value, clipped": (
        partial(value_loss, clip=0.3), ("values", "returns", "loss_mask", "old_values"),
    ),
    "reference_kl": (reference_kl, ("logprobs", "reference_logprobs", "loss_mask")),
    "positive_lm": (imitation, ("logprobs", "loss_mask", "is_correct")),
}  # fmt: skip
"""Name: (loss, its tensors; the gradient is of the first)."""
EACH = pytest.mark.parametrize("name", LOSSES)
POLICY = pytest.mark.parametrize("name", list(LOSSES)[:3])


def batch(name, num_tokens=200):
    """The tensors of a loss, by name; a third of the ratios leave the policy losses' ranges."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, num_tokens, generator=generator, dtype=torch.float64)
    old = -draw().abs() - 0.05
    made = {
        "logprobs": -(old - 0.6 * draw()).abs(), "old_logprobs": old, "rollout_logprobs": old,
        "reference_logprobs": old.clone(), "advantages": draw(), "values": draw(),
        "returns": draw(), "old_values": draw(), "is_correct": draw() > 0, "loss_mask": draw() > -1,
    }  # fmt: skip
    # So far that the KL is its tangent.
    made["reference_logprobs"][3:5] += 50
    return {key: made[key] for key in LOSSES[name][1]}


def trained(tensors):
    """The tokens that a loss is of."""
    return tensors["loss_mask"] & tensors.get("is_correct", tensors["loss_mask"])


def computed(name, tensors, count):
    """(loss, metrics, gradient)."""
    function, (first, *_) = LOSSES[name]
    wanted = tensors[first].clone().requires_grad_()
    loss, metrics = function(**{**tensors, first: wanted}, num_tokens=count)
    assert not any(value.requires_grad or value.ndim for value in metrics.values())
    (gradient,) = torch.autograd.grad(loss, wanted)
    return loss.item(), {key: float(value) for key, value in metrics.items()}, gradient


def close(expected):
    return pytest.approx(expected, rel=1e-13, abs=1e-13)


@EACH
@pytest.mark.parametrize("count", [160, torch.tensor(160), torch.tensor(160.0)])
def test_microbatches_with_the_global_count_add_up(name, count):
    tensors = batch(name)
    whole, metrics, gradient = computed(name, tensors, count)
    parts = [
        computed(name, {key: x[lo:hi] for key, x in tensors.items()}, count)
        for lo, hi in ((0, 1), (1, 90), (90, 90), (90, 200))
    ]
    assert sum(loss for loss, *_ in parts) == close(whole) and whole != 0
    assert {key: sum(found[key] for _, found, _ in parts) for key in metrics} == close(metrics)
    torch.testing.assert_close(torch.cat([g for *_, g in parts]), gradient, rtol=1e-14, atol=1e-15)


@EACH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_order_and_what_is_masked_out_do_not_matter(name, bad):
    tensors, order = batch(name), torch.randperm(200)
    loss, metrics, gradient = computed(name, tensors, 160)
    kept = trained(tensors)
    dirty = {
        key: (x.masked_fill(~kept, bad) if x.is_floating_point() else x)[order]
        for key, x in tensors.items()
    }
    other, other_metrics, other_gradient = computed(name, dirty, 160)
    assert other == close(loss) and other_metrics == close(metrics)
    torch.testing.assert_close(other_gradient, gradient[order], rtol=1e-14, atol=1e-15)
    assert bool((other_gradient[~kept[order]] == 0).all())


@EACH
@pytest.mark.parametrize("count", [0, torch.tensor(0), torch.tensor(0.0)])
@pytest.mark.parametrize("masked", ["all", "none", "no tokens"])
def test_zero_count_is_exactly_zero_with_the_graph_intact(name, count, masked):
    tensors, first = batch(name, 0 if masked == "no tokens" else 20), LOSSES[name][1][0]
    parameter = torch.ones(3, dtype=torch.float64, requires_grad=True)
    tensors[first] = tensors[first] + parameter.sum()
    tensors["loss_mask"] = tensors["loss_mask"] & (masked == "none")
    loss, metrics = LOSSES[name][0](**tensors, num_tokens=count)
    loss.backward()
    assert loss.item() == 0 and parameter.grad.tolist() == [0, 0, 0]
    assert all(float(value) == 0 for value in metrics.values())


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_narrow_dtypes_are_refused_by_name(name, dtype):
    tensors = batch(name)
    for field, x in tensors.items():
        with pytest.raises(ValueError, match=f"^{field}.dtype={dtype} must be"):
            LOSSES[name][0](**{**tensors, field: x.to(dtype)}, num_tokens=4)


@POLICY
def test_at_ratio_1_the_gradient_is_minus_the_advantage(name):
    tensors = batch(name)
    tensors["logprobs"] = tensors[LOSSES[name][1][1]]
    _, metrics, gradient = computed(name, tensors, 1)
    expected = -tensors["advantages"] * tensors["loss_mask"]
    torch.testing.assert_close(gradient, expected, rtol=1e-15, atol=0)
    assert set(metrics.values()) == {0}

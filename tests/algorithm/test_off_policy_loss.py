"""DIS and DPPO against the sampler's log-probabilities: by hand, against loops and autograd.

Not exercised: the division by counts that really were all-reduced over ranks (tests/distributed).
"""

import math

import pytest
import torch

from tests import reference
from vapo_megatron.algorithm.off_policy_loss import dis_policy_loss, dppo_tv_policy_loss
from vapo_megatron.algorithm.policy_loss import loss_count, token_weights

DIS = {"low": 0.3, "high": 5.0}
DPPO = {"max_difference": 0.15, "ratio_cap": 20.0}
LOSSES = {"dis": (dis_policy_loss, DIS), "dppo_tv": (dppo_tv_policy_loss, DPPO)}
NAMES = pytest.mark.parametrize("name", LOSSES)


def computed(name, *tensors, **options):
    function, settings = LOSSES[name]
    return function(*tensors, **(settings | options))


def by_loop(name, logprobs, *rest, count):
    if name == "dis":
        return reference.dis_loss(logprobs, *rest, **DIS, count=count)
    settings = {"difference": DPPO["max_difference"], "cap": DPPO["ratio_cap"]}
    return reference.dppo_tv_loss(logprobs, *rest, **settings, count=count)


def batch(num_tokens=200, seed=0, dtype=torch.float64):
    """(logprobs, rollout_logprobs, advantages, mask); about a third of the tokens is dropped."""
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages = torch.randn(3, num_tokens, generator=generator, dtype=dtype)
    old = -old.abs() - 0.05
    mask = torch.rand(num_tokens, generator=generator) < 0.8
    return -(old - 0.6 * new).abs(), old, advantages, mask


def lists(*tensors):
    return [t.double().tolist() for t in tensors]


def logs(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_dis_golden_numbers():
    # mu, pi -> r: .2, .3 -> 1.5, kept; .5, .3 -> .6, below .7; .1, .65 -> 6.5, above 6; .2, .1 ->
    # .5, below whatever the sign of A; a fifth token is masked out.
    # L = -(1.5 * 2 * log .3) / 8, dL/dlogprobs = -3/8, with N = 8 of the whole mini-batch.
    new = logs(0.3, 0.3, 0.65, 0.1, 0.5).requires_grad_()
    advantages = torch.tensor([2.0, -1.0, 1.0, 3.0, 9.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, True, False])
    loss, metrics = dis_policy_loss(
        new, logs(0.2, 0.5, 0.1, 0.2, 0.1), advantages, mask, **DIS, num_tokens=8
    )
    loss.backward()
    assert loss.item() == pytest.approx(-3 * math.log(0.3) / 8, abs=1e-15)
    assert new.grad.tolist() == pytest.approx([-3 / 8, 0, 0, 0, 0], abs=1e-15)
    assert float(metrics["clip_fraction_low"]) == 2 / 8
    assert float(metrics["clip_fraction_high"]) == 1 / 8
    # k3 = r - 1 - log r of the four tokens
    k3 = sum(r - 1 - math.log(r) for r in (1.5, 0.6, 6.5, 0.5))
    assert float(metrics["approx_kl"]) == pytest.approx(k3 / 8)
    assert set(metrics) == {"approx_kl", "clip_fraction_low", "clip_fraction_high"}


def test_dis_drops_at_its_bounds():
    # r = 1/2 and 2 with low .5 and high 1: the range is open.
    zero = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    rollout = torch.tensor([math.log(2), -math.log(2), 0.69, -0.69], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    loss, _ = dis_policy_loss(zero, rollout, ones, ones.bool(), low=0.5, high=1.0, num_tokens=1)
    loss.backward()
    assert zero.grad.tolist() == pytest.approx([0, 0, -math.exp(-0.69), -math.exp(0.69)])


def test_dppo_golden_numbers():
    # mu, pi, A, with d = .15:
    # .5, .75, 1: grew by .25, dropped           .05, .075, 2: grew by .025, kept, r 1.5
    # .5, .75, -1: grew, but should fall: kept, r 1.5
    # .5, .25, -1: fell by .25, dropped          .5, .25, 1: fell, but should grow: kept, r .5
    # .001, .05, 4: grew by .049, kept, r 50 held at 20
    new = logs(0.75, 0.075, 0.75, 0.25, 0.25, 0.05).requires_grad_()
    mu = logs(0.5, 0.05, 0.5, 0.5, 0.5, 0.001)
    advantages = torch.tensor([1.0, 2, -1, -1, 1, 4], dtype=torch.float64)
    mask = torch.ones(6, dtype=torch.bool)
    loss, metrics = dppo_tv_policy_loss(new, mu, advantages, mask, **DPPO, num_tokens=10)
    loss.backward()
    weights = [0, 1.5 * 2, 1.5 * -1, 0, 0.5, 20 * 4]
    assert new.grad.tolist() == pytest.approx([-w / 10 for w in weights], abs=1e-12)
    expected = -sum(w * x for w, x in zip(weights, new.tolist())) / 10
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert float(metrics["clip_fraction_low"]) == 1 / 10
    assert float(metrics["clip_fraction_high"]) == 1 / 10


def test_a_rare_token_may_grow_further_in_dppo_than_under_a_clipped_ratio():
    # From .01 to .1: a ratio of 10, which PPO's clip and DIS drop, moved by .09.
    new, mu = logs(0.1).requires_grad_(), logs(0.01)
    one, mask = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.bool)
    found = {}
    for name in LOSSES:
        loss, _ = computed(name, new, mu, one, mask, num_tokens=1)
        (found[name],) = torch.autograd.grad(loss, new)
    assert float(found["dis"]) == 0 and float(found["dppo_tv"]) == pytest.approx(-10)


@NAMES
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("count", [160, 1000])
def test_value_and_gradient_equal_the_loop(name, weighted, count):
    new, sampled, advantages, mask = batch()
    weights = mask * torch.rand(200, dtype=torch.float64) if weighted else mask
    new.requires_grad_()
    loss, metrics = computed(name, new, sampled, advantages, weights, num_tokens=count)
    loss.backward()
    expected, gradient = by_loop(name, *lists(new.detach(), sampled, advantages, weights),
                                 count=count)  # fmt: skip
    assert loss.item() == pytest.approx(expected, abs=1e-13)
    torch.testing.assert_close(new.grad.tolist(), gradient, rtol=0, atol=1e-14)
    dropped = sum(g == 0 for g, m in zip(gradient, mask.tolist()) if m)
    assert 0.1 * 160 < dropped < 0.7 * 160, "too few on either side to tell"
    both = float(metrics["clip_fraction_low"]) + float(metrics["clip_fraction_high"])
    assert both * count == pytest.approx(dropped)


@NAMES
def test_dropped_tokens_stay_in_the_denominator(name):
    # Two tokens of which one is dropped: the other one's gradient is A r / 2 either way.
    kept, far = (0.5, 0.5), (0.1, 0.9)
    mu, new = logs(kept[0], far[0]), logs(kept[1], far[1]).requires_grad_()
    ones, mask = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    bounds = torch.tensor([0, 2])
    for level in ("token", "sample"):
        weights, count = token_weights(mask, bounds, level), loss_count(mask, bounds, level)
        loss, metrics = computed(
            name, new, mu, ones, weights, num_tokens=count, num_trained_tokens=2
        )
        (gradient,) = torch.autograd.grad(loss, new)
        assert gradient.tolist() == pytest.approx([-0.5, 0])
        assert float(metrics["clip_fraction_high"]) == 1 / 2


@NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distance", [100.0, 1000.0])
def test_far_apart(name, dtype, distance):
    # The ratio overflows; the gradient and the metrics do not.
    new = torch.tensor([0.0, -distance], dtype=dtype, requires_grad=True)
    mask = torch.ones(2, dtype=torch.bool)
    for sign in (1, -1):
        advantages = torch.full((2,), float(sign), dtype=dtype)
        loss, metrics = computed(name, new, new.detach().flip(0), advantages, mask, num_tokens=2)
        (gradient,) = torch.autograd.grad(loss, new)
        assert bool(gradient.isfinite().all()) and bool(loss.isfinite())
        assert all(bool(value.isfinite()) for value in metrics.values())


@NAMES
def test_metrics_are_of_tokens_whatever_the_weights(name):
    new, sampled, advantages, mask = batch()
    weights, bounds = mask * torch.rand(200), torch.tensor([0, 150, 200])
    found = {}
    for level in ("token", "sample"):
        _, found[level] = computed(
            name,
            new.requires_grad_(),
            sampled,
            advantages,
            token_weights(weights, bounds, level).double(),
            num_tokens=loss_count(weights, bounds, level),
            num_trained_tokens=loss_count(weights, bounds, "token"),
        )
    assert found["token"] == found["sample"]


def test_bad_settings_are_refused():
    cases = {
        "dis": [{"low": 0.0}, {"low": 1.1}, {"high": 0.0}, {"high": math.nan}],
        "dppo_tv": [{"max_difference": 0.0}, {"max_difference": 1.5}, {"ratio_cap": 0.5}],
    }
    for name, settings in cases.items():
        for setting in settings:
            ((field, value),) = setting.items()
            with pytest.raises(ValueError, match=f"{field}={value}"):
                computed(name, *batch(4), **setting, num_tokens=4)

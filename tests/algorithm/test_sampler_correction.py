"""Weights against the mismatch of sampler and trainer: by hand, and in the loss's denominators.

Not exercised: a sampler that really differs (tests/gpu).
"""

import math

import pytest
import torch

from vapo_megatron.algorithm.policy_loss import loss_count, token_weights
from vapo_megatron.algorithm.sampler_correction import icepop_mask, truncated_importance_mask

RANGE = {"low": 0.5, "high": 5.0}
MASK = torch.tensor([1, 1, 1, 1, 0]).bool()
RATIOS = torch.tensor([0.25, 1.0, 4.0, 8.0, 100.0], dtype=torch.float64)


def tis(ratios, mask, *, cap=2.0, num_tokens=4):
    old = torch.full_like(ratios, -1.5)
    return truncated_importance_mask(old, old - ratios.log(), mask, cap=cap, num_tokens=num_tokens)


def icepop(ratios, mask, *, num_tokens=4, **bounds):
    old = torch.full_like(ratios, -1.5)
    return icepop_mask(old, old - ratios.log(), mask, **(RANGE | bounds), num_tokens=num_tokens)


# min(k, 2) of .25, 1, 4, 8, two of which are held; .25 and 8 leave [.5, 5], the rest keeps its k.
@pytest.mark.parametrize("correct,expected", [(tis, [0.25, 1, 2, 2, 0]), (icepop, [0, 1, 4, 0, 0])])
def test_golden_numbers(correct, expected):
    mask, metrics = correct(RATIOS, MASK, num_tokens=8)
    assert mask.dtype == torch.float32
    assert mask.tolist() == pytest.approx(expected, abs=1e-6)
    # Two of N = 8; the mean counts all four: (.25 + 1 + 4 + 8) / 8.
    assert float(metrics["sampler_corrected_fraction"]) == 2 / 8
    assert float(metrics["sampler_ratio"]) == pytest.approx(13.25 / 8)


def test_numbers_that_other_implementations_give():
    ratios, ones = torch.tensor([0.4, 0.8, 6.0]), torch.ones(3, dtype=torch.bool)
    mask, _ = icepop(ratios, ones)
    assert mask.tolist() == pytest.approx([0, 0.8, 0], abs=1e-7)


def test_icepop_keeps_its_bounds():
    zero = torch.zeros(4, dtype=torch.float64)
    rollout = torch.tensor([math.log(2), -math.log(2), 0.7, -0.7], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.bool)
    mask, _ = icepop_mask(zero, rollout, ones, low=0.5, high=2.0, num_tokens=4)
    # k = 1/2 and 2 stay; e^-.7 = .4966 and e^.7 = 2.0138 go
    assert mask.tolist() == [0.5, 2, 0, 0]


@pytest.mark.parametrize("correct", [tis, icepop])
def test_float_weights_scale_the_mask_and_not_the_metrics(correct):
    weights = torch.tensor([0.5, 0.25, 2.0, 3.0, 0.0])
    plain, metrics = correct(RATIOS, MASK)
    scaled, weighted_metrics = correct(RATIOS, weights)
    assert torch.equal(scaled, plain * weights)
    assert weighted_metrics == metrics


@pytest.mark.parametrize("correct", [tis, icepop])
def test_equal_engines_change_nothing(correct):
    mask, metrics = correct(torch.ones(5), MASK)
    assert torch.equal(mask, MASK.float())
    assert [float(x) for x in metrics.values()] == [1, 0]


def test_denominators():
    # response 1 is tokens 0 and 3, wholly dropped by IcePop; response 2 keeps both of its tokens
    ratios, bounds = torch.tensor([0.1, 9.0, 1.0, 2.5]), torch.tensor([0, 2, 4])
    ones = torch.ones(4, dtype=torch.bool)
    dropped, capped = icepop(ratios, ones)[0], tis(ratios, ones)[0]
    for aggregation, before, after in (("token", 4, 2), ("sample", 2, 1), ("constant", 2, 1)):
        assert int(loss_count(dropped, bounds, aggregation)) == after
        assert int(loss_count(capped, bounds, aggregation)) == before
    assert token_weights(dropped, bounds, "sample").tolist() == pytest.approx([0, 0, 0.5, 1.25])
    assert token_weights(capped, bounds, "sample").tolist() == pytest.approx([0.05, 1, 0.5, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distance", [100.0, 1000.0, math.inf])
def test_far_apart(dtype, distance):
    old = torch.tensor([0.0, -distance], dtype=dtype)
    rollout, ones = old.flip(0), torch.ones(2, dtype=torch.bool)
    mask, metrics = truncated_importance_mask(old, rollout, ones, cap=2.0, num_tokens=2)
    assert mask[0] == pytest.approx(2, abs=1e-6) and 0 < mask[1] < 1e-30
    assert float(metrics["sampler_corrected_fraction"]) == 0.5
    assert float(metrics["sampler_ratio"]) == pytest.approx(math.exp(80) / 2, rel=1e-5)
    mask, metrics = icepop_mask(old, rollout, ones, **RANGE, num_tokens=2)
    assert mask.tolist() == [0, 0]
    assert float(metrics["sampler_corrected_fraction"]) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("correct", [truncated_importance_mask, icepop_mask])
def test_masked_tokens_do_not_matter(correct, bad):
    settings = {"cap": 2.0} if correct is truncated_importance_mask else RANGE
    old = torch.tensor([-1.0, bad], requires_grad=True)
    rollout, kept = torch.tensor([-1.0, -1.0]), torch.tensor([True, False])
    mask, metrics = correct(old, rollout, kept, **settings, num_tokens=1)
    assert mask.tolist() == [1, 0] and not mask.requires_grad
    assert not any(x.requires_grad for x in metrics.values())
    assert [float(x) for x in metrics.values()] == [1, 0]


@pytest.mark.parametrize("correct", [tis, icepop])
@pytest.mark.parametrize("num_tokens", [4, torch.tensor(4)])
def test_microbatches_with_the_global_count_add_up(correct, num_tokens):
    whole, metrics = correct(RATIOS, MASK, num_tokens=num_tokens)
    parts = [
        correct(RATIOS[part], MASK[part], num_tokens=num_tokens)
        for part in (slice(0, 1), slice(1, 1), slice(1, 5))
    ]
    assert torch.equal(torch.cat([mask for mask, _ in parts]), whole)
    for name, value in metrics.items():
        assert sum(float(m[name]) for _, m in parts) == pytest.approx(float(value), abs=1e-14)
        assert value.ndim == 0
    mask, metrics = correct(RATIOS[:0], MASK[:0], num_tokens=0)
    assert mask.shape == (0,) and [float(x) for x in metrics.values()] == [0, 0]


def test_refusals():
    for cap in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"tis_cap={cap} must be above 0"):
            tis(RATIOS, MASK, cap=cap)
    for bounds in ({"low": 0.0}, {"low": 1.5}, {"high": 0.9}, {"low": math.nan}):
        name = next(iter(bounds))
        with pytest.raises(ValueError, match=f"icepop_{name}={bounds[name]}"):
            icepop(RATIOS, MASK, **bounds)
    for index, name in enumerate(("old_logprobs", "rollout_logprobs", "loss_mask")):
        tensors = [torch.zeros(5), torch.zeros(5), MASK]
        tensors[index] = tensors[index].bfloat16()
        with pytest.raises(ValueError, match=f"^{name}.dtype=torch.bfloat16"):
            truncated_importance_mask(*tensors, cap=2.0, num_tokens=4)
        with pytest.raises(ValueError, match=f"^{name}.dtype=torch.bfloat16"):
            icepop_mask(*tensors, **RANGE, num_tokens=4)

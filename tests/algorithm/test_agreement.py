"""Which differences of log-probabilities are rounding: by hand, at the limits and beyond."""

import math

import pytest
import torch

from vapo_megatron.algorithm.agreement import (
    RATIO_LIMITS,
    Limits,
    difference_sums,
    excess,
    far_maximum,
)


def test_sums_by_hand():
    difference = torch.tensor([0.0, 0.2, 0.05, 0.3, 9.0])
    mask = torch.tensor([1.0, 0.5, 1.0, 2.0, 0.0])
    sums = difference_sums(difference, mask, 0.1)
    assert sums.dtype == torch.float64 and sums.tolist() == pytest.approx([4, 0.55, 2])
    assert difference_sums(difference[:0], mask[:0], 0.1).tolist() == [0, 0, 0]


def test_mean_and_quantile_are_each_a_limit():
    limits = Limits(mean=0.01, high=0.1)
    assert excess(0.01, 0.01, limits) is None
    assert excess(0.011, 0.0, limits) == "0.011 in the mean (limit 0.01)"
    assert excess(0.0, 0.02, limits) == "more than 0.1 on 2.0% of the tokens (limit 1% of them)"
    # Such an update is skipped, and counted as that.
    assert excess(math.nan, math.nan, limits) is None


def test_the_maximum_is_a_warning():
    high = RATIO_LIMITS["bfloat16"].high
    near = {"actor/first_ratio_diff_max": 9 * high, "rollout/logprob_diff_max": 9 * 0.5}
    assert far_maximum(near, "bfloat16", 0.5) == ""
    assert f"actor/first_ratio_diff_max {9 * high:.3g}:" in far_maximum(near, "float32", 0.5)
    assert "rollout/logprob_diff_max 4.5:" in far_maximum(near, "bfloat16", 0.4)
    assert far_maximum(near, "bfloat16", None) == far_maximum({}, "float32", 0.5) == ""

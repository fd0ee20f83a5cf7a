"""Repetition of prompts, the switch between critic-only and joint training, when to throw it.

Not exercised: the sampling itself (tests/rollout), the trainer that reads the switch (tests/e2e).
"""

import math

import pytest
import torch

from vapo_megatron.algorithm.group_sampling import repeat_for_group
from vapo_megatron.algorithm.value_loss import ranged_values
from vapo_megatron.algorithm.value_pretraining import (
    actor_is_trained,
    bias_to_mean_return,
    critic_has_settled,
    error_is_large,
)


def test_groups_stand_side_by_side():
    prompts = ["a", "b", "c"]
    repeated = repeat_for_group(prompts, 4)
    assert repeated == ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    assert [repeated[i * 4 : (i + 1) * 4] for i in range(3)] == [[p] * 4 for p in prompts]
    assert repeat_for_group(tuple(prompts), 1) == prompts
    assert repeat_for_group([], 4) == []
    assert prompts == ["a", "b", "c"]


@pytest.mark.parametrize("group_size", [0, -2])
def test_a_group_has_at_least_one_response(group_size):
    with pytest.raises(ValueError, match=f"group_size={group_size} must be at least 1"):
        repeat_for_group(["a"], group_size)


def test_the_actor_trains_from_the_step_after_value_pretraining():
    assert [actor_is_trained(step, 3) for step in range(5)] == [False, False, False, True, True]
    assert actor_is_trained(0, 0)


def test_value_pretraining_is_patient():
    for history, patience, settled in [
        ([], 1, False),
        ([0.5], 1, False),  # nothing came before it
        ([0.5, 0.6], 1, False),
        ([0.6, 0.5], 1, True),
        ([0.5, 0.5], 1, True),  # standing still is no rise
        ([0.6, 0.5], 2, False),  # the two last steps are all there are
        ([0.1, 0.6, 0.5, 0.4], 2, True),
        ([0.1, 0.6, 0.5, 0.7], 2, False),
        ([0.1, 0.6, 0.5, 0.55], 3, False),  # it rose above .1 within three steps
        ([0.9, 0.6, 0.7, 0.8], 3, True),  # below the maximum, however it rises
        ([0.9, 0.6, 0.7, 0.8], 2, True),  # .9 is what they must pass, not .6
        ([-3.0, -2.0, -1.0], 1, False),
        ([0.0, -0.1, -0.2], 1, False),  # a constant is as good: nothing has been learned yet
        ([math.nan, math.nan], 1, False),
        ([0.5, math.nan, math.nan], 2, True),
        ([math.nan, 0.5], 1, False),
    ]:
        assert critic_has_settled(history, patience) is settled, (history, patience, settled)


def test_a_critic_that_is_wrong_in_the_mean_has_not_settled():
    """Half a standard deviation of the returns is the limit."""
    for error, spread, is_large in [(0.4, 0.8, False), (-0.41, 0.8, True), (0.41, 0.8, True)]:
        assert error_is_large(error, spread) is is_large
    assert not error_is_large(math.nan, 1.0)
    assert critic_has_settled([0.6, 0.5], 1)
    assert not critic_has_settled([0.6, 0.5], 1, is_off=True)


def test_a_head_starts_at_the_mean_return():
    assert bias_to_mean_return(0.25, -0.9) == pytest.approx(-1.15)
    low, high = -1.0, 3.0
    for mean in (-0.9, 0.0, 2.5):
        bias = bias_to_mean_return(1.0, mean, (low, high))  # A head of 0 is the middle, 1.
        found = ranged_values(torch.tensor([bias], dtype=torch.float64), low, high)
        assert float(found) == pytest.approx(mean)
    # At an end of the range, where the head would be infinite.
    assert bias_to_mean_return(1.0, -1.0, (low, high)) == pytest.approx(math.tan(-0.49 * math.pi))


def test_patience_is_at_least_1():
    with pytest.raises(ValueError, match="value_pretraining_patience=0 must be at least 1"):
        critic_has_settled([0.1, 0.2], 0)

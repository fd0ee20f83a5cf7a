"""Repetition of prompts and the switch between critic-only and joint training.

Not exercised: the sampling itself (tests/rollout), the trainer that reads the switch (tests/e2e).
"""

import pytest

from vapo_megatron.algorithm.group_sampling import repeat_for_group
from vapo_megatron.algorithm.value_pretraining import actor_is_trained


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

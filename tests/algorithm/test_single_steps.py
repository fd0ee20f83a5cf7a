"""Advantages where a trajectory's steps are responses of their own, as in SWiRL (2504.04736).

A group is the responses to one state, and nothing is bootstrapped from the next state.
"""

import json
from pathlib import Path

import pytest
import torch

from vapo_megatron.algorithm.gae import decoupled_gae
from vapo_megatron.algorithm.group_advantages import group_advantages, group_sums

VECTORS = json.loads((Path(__file__).parents[1] / "data/swirl.json").read_text())


@pytest.mark.parametrize("case", VECTORS["group_advantages"], ids=lambda c: str(c["step_rewards"]))
def test_a_group_is_the_responses_to_one_state(case):
    rewards = torch.tensor(case["step_rewards"], dtype=torch.float64)
    groups = torch.zeros(len(rewards), dtype=torch.int64)
    sums = group_sums(rewards, groups, 1)
    found = group_advantages(rewards, groups, sums, "grpo")
    torch.testing.assert_close(
        found, torch.tensor(case["grpo"], dtype=torch.float64), rtol=0, atol=1e-9
    )


def test_groups_of_states_do_not_mix():
    cases = VECTORS["group_advantages"]
    rewards = torch.tensor([r for c in cases for r in c["step_rewards"]], dtype=torch.float64)
    groups = torch.arange(len(cases)).repeat_interleave(4)
    found = group_advantages(rewards, groups, group_sums(rewards, groups, len(cases)), "grpo")
    expected = torch.tensor([a for c in cases for a in c["grpo"]], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_a_sub_trajectory_is_an_episode_of_its_own():
    case = VECTORS["gae_of_one_sub_trajectory"]
    size = len(case["values"])
    rewards = torch.zeros(2 * size, dtype=torch.float64)
    rewards[size - 1] = case["reward"]
    # The next step's values follow in the batch, and must not be seen.
    values = torch.tensor([*case["values"], 9.0, 9.0, 9.0], dtype=torch.float64)
    ends = torch.tensor([0, size, 2 * size])
    found, _ = decoupled_gae(rewards, values, ends, lambda_actor=case["lambda_"])
    expected = torch.tensor(case["advantages"], dtype=torch.float64)
    torch.testing.assert_close(found[:size], expected, rtol=0, atol=1e-12)

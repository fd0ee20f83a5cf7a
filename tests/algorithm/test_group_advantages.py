"""Group advantages by hand, against a loop, and with groups spread over ranks.

Not exercised: the all-reduce between the two halves.
"""

import itertools
import math

import pytest
import torch

from vapo_megatron.algorithm.group_advantages import group_advantages, group_sums


def whole(rewards, groups, estimator):
    """Both halves on one rank."""
    sums = group_sums(rewards, groups, int(groups.max()) + 1)
    return group_advantages(rewards, groups, sums, estimator)


def loop(rewards, groups, estimator):
    """Two passes over each group, in plain Python."""
    advantages = []
    for reward, group in zip(rewards, groups):
        members = [r for r, g in zip(rewards, groups) if g == group]
        mean = math.fsum(members) / len(members)
        squares = math.fsum((r - mean) ** 2 for r in members)
        std = math.sqrt(squares / (len(members) - 1))
        advantages.append((reward - mean) / (std + 1e-6 if estimator == "grpo" else 1))
    return advantages


REWARDS = torch.tensor([1.0, -1, -1, -1, 3, 5], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1])


def test_dr_grpo_golden_numbers():
    # 1 -1 -1 -1: mean -.5, distances 1.5 and -.5;  3 5: mean 4, distances -1 and 1
    assert whole(REWARDS, GROUPS, "dr_grpo").tolist() == [1.5, -0.5, -0.5, -0.5, -1, 1]


def test_grpo_golden_numbers():
    # sample variances (1.5^2 + 3 * .5^2) / 3 = 3 / 3 = 1 and (1 + 1) / 1 = 2
    first, second = 1 / (1 + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    expected = [1.5 * first, -0.5 * first, -0.5 * first, -0.5 * first, -second, second]
    assert whole(REWARDS, GROUPS, "grpo").tolist() == pytest.approx(expected, abs=1e-14)


def test_epsilon_stands_beside_the_standard_deviation():
    # rewards 0 and 2e-6: mean 1e-6, std sqrt(2) * 1e-6, so that A = -+1 / (sqrt(2) + 1)
    rewards = torch.tensor([0.0, 2e-6], dtype=torch.float64)
    expected = 1 / (math.sqrt(2) + 1)
    assert whole(rewards, GROUPS[:2], "grpo").tolist() == pytest.approx([-expected, expected])


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_equals_the_loop_wherever_groups_lie(estimator, offset):
    generator = torch.Generator().manual_seed(0)
    groups = torch.randperm(96, generator=generator) % 12
    rewards = torch.randn(96, generator=generator, dtype=torch.float64) + offset
    expected = loop(rewards.tolist(), groups.tolist(), estimator)
    assert whole(rewards, groups, estimator).tolist() == pytest.approx(expected, abs=1e-12)
    narrow = whole(rewards.float(), groups, estimator)
    assert narrow.dtype == torch.float32
    assert narrow.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
def test_equal_rewards_are_worth_exactly_nothing(estimator):
    dtypes, levels = (torch.float32, torch.float64), (0.0, 1.0, -1.0, 0.1, 1 / 3, 1e6 + 0.3)
    for case in itertools.product(dtypes, levels, (1, 3, 7, 16)):
        dtype, level, size = case
        rewards = torch.full((2 * size,), level, dtype=dtype)
        rewards[size:] = 5
        groups = torch.arange(2 * size) // size
        assert whole(rewards, groups, estimator).tolist() == [0.0] * (2 * size), case


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
def test_a_group_of_one_has_nothing_to_compare_with(estimator):
    rewards = torch.tensor([7.0, 1, -1])
    assert whole(rewards, torch.tensor([0, 1, 1]), estimator)[0] == 0


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
def test_groups_spread_over_ranks_add_up(estimator):
    # The last rank has no response, the second no complete group; group 4 is nobody's.
    rewards = torch.tensor([0.1, 1, 0.3, 0.7, -1, 0.1, 0.1, 0.1])
    groups = torch.tensor([0, 1, 0, 1, 0, 2, 2, 3])
    ranks = [torch.tensor([7, 0, 5, 1]), torch.tensor([2, 6]), torch.tensor([4, 3]),
             torch.tensor([], dtype=torch.long)]  # fmt: skip
    sums = sum(group_sums(rewards[r], groups[r], 5) for r in ranks)
    assert sums.dtype == torch.float64 and sums[:, 0].tolist() == [3, 2, 2, 1, 0]
    expected = group_advantages(rewards, groups, group_sums(rewards, groups, 5), estimator)
    assert expected[5:].tolist() == [0, 0, 0]
    for rank in ranks:
        part = group_advantages(rewards[rank], groups[rank], sums, estimator)
        assert torch.equal(part, expected[rank])


def test_refusals():
    sums = group_sums(REWARDS, GROUPS, 2)
    with pytest.raises(ValueError, match="advantage_estimator='gae'"):
        group_advantages(REWARDS, GROUPS, sums, "gae")
    with pytest.raises(ValueError, match="rewards.dtype=torch.bfloat16"):
        group_sums(REWARDS.bfloat16(), GROUPS, 2)
    with pytest.raises(ValueError, match="rewards.dtype=torch.bfloat16"):
        group_advantages(REWARDS.bfloat16(), GROUPS, sums, "grpo")
    for groups in (GROUPS[1:], GROUPS.float()):
        with pytest.raises(ValueError, match="groups: shape"):
            group_sums(REWARDS, groups, 2)
        with pytest.raises(ValueError, match="groups: shape"):
            group_advantages(REWARDS, groups, sums, "grpo")
    for bad in (sums.float(), sums[:, :2], sums[0]):
        with pytest.raises(ValueError, match="sums: shape"):
            group_advantages(REWARDS, GROUPS, bad, "grpo")

"""Reward shaping, by hand. Not exercised: where the verdict comes from."""

import pytest

from vapo_megatron.config import RewardConfig
from vapo_megatron.reward.shaping import shaped_reward, soft_overlong_punishment


def test_two_values_and_the_truncated_one():
    reward = RewardConfig(correct=1.0, incorrect=-1.0, truncated_correct=0.25)
    # (is_correct, truncated) -> the three values of the config
    assert shaped_reward(True, False, 10, reward, 100) == 1.0
    assert shaped_reward(True, True, 10, reward, 100) == 0.25
    assert shaped_reward(False, False, 10, reward, 100) == -1.0
    assert shaped_reward(False, True, 10, reward, 100) == -1.0
    zero_one = RewardConfig(correct=1.0, incorrect=0.0)
    assert shaped_reward(False, False, 10, zero_one, 100) == 0.0


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, 0.0),
        (16384, 0.0),  # L_max - L_cache = 20480 - 4096: the last length without punishment
        (16385, -1 / 4096),
        (17408, -0.25),  # (16384 - 17408)/4096
        (20480, -1.0),  # (16384 - 20480)/4096
        (20481, -1.0),
    ],
)
def test_soft_overlong_punishment_of_dapo(length, expected):
    assert soft_overlong_punishment(length, 20480, 4096) == expected


def test_no_buffer_means_no_punishment_at_any_length():
    assert soft_overlong_punishment(100, 100, 0) == 0.0
    assert soft_overlong_punishment(1000, 100, 0) == 0.0


def test_the_punishment_is_scaled_and_added_to_right_and_wrong():
    reward = RewardConfig(overlong_buffer_tokens=40, overlong_penalty=0.5)
    # 90 of 100 tokens, buffer 40: (60 - 90)/40 = -0.75; times 0.5 = -0.375
    assert shaped_reward(True, False, 90, reward, 100) == 1.0 - 0.375
    assert shaped_reward(False, False, 90, reward, 100) == -1.0 - 0.375
    assert shaped_reward(True, False, 60, reward, 100) == 1.0

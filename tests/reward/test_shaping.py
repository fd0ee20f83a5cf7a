"""Reward shaping, by hand. Not exercised: where the verdict comes from."""

import pytest

from vapo_megatron.config import RewardConfig
from vapo_megatron.reward.shaping import scored_verdict, shaped_reward, soft_overlong_punishment
from vapo_megatron.reward.verifier import Verdict

RIGHT, WRONG = Verdict("correct"), Verdict("wrong")


def test_two_values_and_the_truncated_one():
    reward = RewardConfig(correct=1.0, incorrect=-1.0, truncated_correct=0.25)
    # (verdict, truncated) -> the three values of the config
    assert shaped_reward(RIGHT, False, 10, reward, 100, "math") == 1.0
    assert shaped_reward(RIGHT, True, 10, reward, 100, "math") == 0.25
    assert shaped_reward(WRONG, False, 10, reward, 100, "math") == -1.0
    assert shaped_reward(WRONG, True, 10, reward, 100, "math") == -1.0
    zero_one = RewardConfig(correct=1.0, incorrect=0.0)
    assert shaped_reward(WRONG, False, 10, zero_one, 100, "math") == 0.0


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
    assert shaped_reward(RIGHT, False, 90, reward, 100, "math") == 1.0 - 0.375
    assert shaped_reward(WRONG, False, 90, reward, 100, "math") == -1.0 - 0.375
    assert shaped_reward(RIGHT, False, 60, reward, 100, "math") == 1.0


def test_a_score_becomes_the_reward_and_a_threshold_the_status():
    reward = RewardConfig(from_score=[-1.0, 3.0], correct_from=2.0, overlong_buffer_tokens=4)
    judged = [
        Verdict("wrong", 2.0),  # at the threshold: correct, whatever the verifier said
        Verdict("correct", 1.9),
        Verdict("unparsable"),  # no score: the lowest, and its own status
        Verdict("correct", 3.5, answer="x"),  # outside: no verdict
        Verdict("failed", 2.5),  # what failed has no score, whatever it says
        Verdict("timed_out", 2.5),
    ]
    found = [scored_verdict(verdict, reward, "math") for verdict in judged]
    assert [v.status for v in found] == [
        "correct", "wrong", "unparsable", "failed", "failed", "timed_out"
    ]  # fmt: skip
    assert found[3].note == "score 3.5 is outside reward.from_score=[-1, 3]"
    # A truncated response has its score, too; 9 of 10 tokens in a buffer of 4: -3/4.
    rewards = [shaped_reward(v, True, 5, reward, 10, "math") for v in found]
    assert rewards == [2.0, 1.9, -1.0, -1.0, -1.0, -1.0]
    assert shaped_reward(found[0], False, 9, reward, 10, "math") == 2.0 - 0.75
    kept = RewardConfig(from_score=[0.0, 1.0])
    assert scored_verdict(Verdict("correct", 0.1), kept, "math") == Verdict("correct", 0.1)
    # Without from_score a score is only written down.
    assert scored_verdict(Verdict("wrong", 7.0), RewardConfig(), "math") == Verdict("wrong", 7.0)
    assert shaped_reward(Verdict("wrong", 7.0), False, 5, RewardConfig(), 10, "math") == -1.0


def test_a_verdict_without_a_score_has_the_ends_of_the_range():
    reward = RewardConfig(from_score=[-2.0, 3.0])
    for truncated in (False, True):
        assert shaped_reward(RIGHT, truncated, 5, reward, 10, "math") == 3.0
        assert shaped_reward(WRONG, truncated, 5, reward, 10, "math") == -2.0
    given = {"correct": 1.0, "incorrect": -1.0, "truncated_correct": 0.25}
    reward = RewardConfig(from_score=[-2.0, 3.0], scales={"math": given})
    for verdict, truncated, expected in (
        (RIGHT, False, 1.0), (RIGHT, True, 0.25), (WRONG, False, -1.0), (WRONG, True, -1.0),
    ):  # fmt: skip
        assert shaped_reward(verdict, truncated, 5, reward, 10, "math") == expected
    # Another verifier has no such values.
    assert shaped_reward(RIGHT, False, 5, reward, 10, "exact") == 3.0
    # A correct response that is truncated is a correct one unless that says otherwise.
    reward = RewardConfig(from_score=[-2.0, 3.0], scales={"math": {"correct": 1.0}})
    assert shaped_reward(RIGHT, True, 5, reward, 10, "math") == 1.0


SCALED = RewardConfig(
    from_score=[-3.0, 3.0],
    correct_from=0.5,
    scales={
        "taste": {"mean": 2.0, "std": 4.0},
        "tests": {"low": 0.0, "high": 20.0, "correct_from": 20.0},
        "strict": {"mean": 2.0, "std": 4.0, "correct_from": 8.0},
    },
)


@pytest.mark.parametrize(
    ("verifier", "score", "reward", "status"),
    [
        ("taste", 2.0, 0.0, "wrong"),  # (2 - 2)/4
        ("taste", 4.0, 0.5, "correct"),  # (4 - 2)/4, the threshold behind the scaling
        ("taste", 3.9, 0.475, "wrong"),
        ("taste", -8.0, -2.5, "wrong"),
        ("taste", 14.0, 3.0, "correct"),  # 3 standard deviations: the end of the range
        ("taste", 99.0, 3.0, "correct"),
        ("taste", -99.0, -3.0, "wrong"),
        ("strict", 7.9, 1.475, "wrong"),  # its own threshold is before the scaling
        ("strict", 8.0, 1.5, "correct"),
        ("tests", 20.0, 3.0, "correct"),  # 0 to 20 is -3 to 3
        ("tests", 19.0, 2.7, "wrong"),
        ("tests", 0.0, -3.0, "wrong"),
        ("tests", 15.0, 1.5, "wrong"),
        ("tests", 20.5, -3.0, "failed"),
        ("tests", -0.1, -3.0, "failed"),
        ("other", 0.5, 0.5, "correct"),  # as it is
        ("other", 3.1, -3.0, "failed"),
    ],
)
def test_scores_are_scaled_by_their_verifiers_statistics(verifier, score, reward, status):
    found = scored_verdict(Verdict("unparsable", score, note="n"), SCALED, verifier)
    assert found.status == status
    assert shaped_reward(found, True, 5, SCALED, 10, verifier) == pytest.approx(reward)
    # What is written down is the score as it was given.
    assert found.score == (None if status == "failed" else score)
    if status == "failed" and verifier == "tests":
        assert found.note.endswith("is outside reward.scales.tests=[0, 20]")


def test_a_scale_never_leaves_the_range():
    """-0.1 + 0.3 is above 0.2 in floating point, and above a value bound of 0.2."""
    reward = RewardConfig(from_score=[-0.1, 0.2], scales={"tests": {"low": 0.0, "high": 1.0}})
    assert shaped_reward(Verdict("correct", 1.0), False, 5, reward, 10, "tests") == 0.2

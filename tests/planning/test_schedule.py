"""Steps of trainers and rollout workers side by side, counted by hand."""

import pytest

from vapo_megatron.planning.schedule import steady_state


@pytest.mark.parametrize(
    ("generation", "training", "sync", "lag", "expected"),
    [
        # By turns: 10 of sampling, 7 of training, 1 to send the weights.
        ([10], [7], 1, 0, (18, 10, 7)),
        # Equal times: both always work, and both stop for the weights.
        ([10], [10], 1, 1, (11, 0, 0)),
        # The sampler is slower: 10 and a pause of 1; the trainers wait for what is left of it.
        ([10], [4], 1, 1, (11, 6, 0)),
        ([10], [4], 1, 3, (11, 6, 0)),
        # The trainers are slower: 10 and 1; the rollout workers may not run further ahead.
        ([4], [10], 1, 1, (11, 0, 6)),
        ([4], [10], 1, 2, (11, 0, 6)),
        # A long and a short step, 10 and 2, of training 6. By turns 16 and 8.
        ([10, 2], [6, 6], 0, 0, (12, 6, 6)),
        # Lag 1: the long one is sampled while the short one is trained on, 6 of its 10 s; the
        # trainers wait 4. Then the short one, 2, while the long one is trained on: 6 + 4 + 6.
        ([10, 2], [6, 6], 0, 1, (8, 2, 2)),
        # Lag 2: the short one is done early, so that the next long one begins 4 s earlier.
        ([10, 2], [6, 6], 0, 2, (6, 0, 0)),
        ([10, 2], [6, 6], 1, 2, (7, 0, 0)),
        # Two long, two short: two steps ahead do not suffice, three do. 22 of sampling in 24.
        ([10, 10, 1, 1], [6, 6, 6, 6], 0, 3, (6, 0, 0.5)),
    ],
)
def test_steps_by_hand(generation, training, sync, lag, expected):
    assert steady_state(generation, training, sync=sync, lag=lag) == pytest.approx(expected)


def test_two_steps_ahead_do_not_even_out_two_long_steps():
    less, enough = (
        steady_state([10, 10, 1, 1], [6] * 4, sync=0, lag=lag).step_seconds for lag in (2, 3)
    )
    assert less > enough == pytest.approx(6)


def test_each_side_works_or_waits():
    """Of every step: its own work, its pause for the weights, and what it waits."""
    for lag in (1, 2, 3):
        found = steady_state([5, 9, 2], [6, 3, 8], sync=0.5, lag=lag)
        assert found.step_seconds == pytest.approx(17 / 3 + 0.5 + found.trainer_idle_seconds)
        assert found.step_seconds == pytest.approx(16 / 3 + 0.5 + found.sampler_idle_seconds)

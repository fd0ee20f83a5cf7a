"""avg@k, pass@k, majority@k and their intervals, against arithmetic and against enumeration.

Not exercised: where samples, verdicts and votes come from (test_judging.py, test_votes.py).
"""

import itertools
import math
import random

import numpy as np
import pytest

from vapo_megatron.rollout.evaluation.statistics import (
    Estimate,
    estimates,
    majority_at_k,
    means,
    pass_at_k,
    pass_sizes,
    problem_values,
)


def responses(statuses, votes=None, lengths=None, truncated=None):
    size = len(statuses)
    votes = votes or [0 if s == "c" else 1 for s in statuses]
    names = {"c": "correct", "w": "wrong", "u": "unparsable", "t": "timed_out"}
    return [
        {"status": names[s], "vote": v, "num_tokens": n, "truncated": t}
        for s, v, n, t in zip(statuses, votes, lengths or [1] * size, truncated or [False] * size)
    ]


def test_pass_at_k_by_hand():
    # 1 - C(3, 2)/C(5, 2) = 1 - 3/10; the plug-in 1 - (1 - 2/5)^2 = 0.64 would be biased.
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7, abs=1e-15)
    # Fewer than k misses exist.
    assert pass_at_k(5, 3, 3) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0
    # 1 - C(31, 16)/C(32, 16) = 16/32.
    assert pass_at_k(32, 1, 16) == pytest.approx(0.5, abs=1e-15)


@pytest.mark.parametrize(("n", "c"), [(6, c) for c in range(7)])
def test_pass_at_k_is_the_mean_over_all_draws(n, c):
    samples = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        draws = [any(draw) for draw in itertools.combinations(samples, k)]
        assert pass_at_k(n, c, k) == pytest.approx(sum(draws) / len(draws), abs=1e-15)


def test_reported_sizes():
    assert [pass_sizes(n) for n in (1, 2, 3, 8, 32)] == [
        [1], [2], [2, 3], [2, 4, 8], [2, 4, 8, 16, 32],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("votes", "correct", "expected"),
    [
        ([0, 0, 1], [True, True, False], 1),
        ([0, 1, 1], [True, False, False], 0),
        # 2 to 2: either wins half of the time.
        ([0, 0, 1, 1], [True, True, False, False], 1 / 2),
        # Three answers with a vote each, one of them correct.
        ([5, 3, 9], [False, True, False], 1 / 3),
        ([5, 3, 9], [False, False, False], 0),
        # No answer is no vote: 1 of 3 responses is enough.
        ([None, 4, None], [False, True, False], 1),
        ([None, None], [False, False], 0),
        ([None, 1, 1, 0], [False, False, False, True], 0),
        # A verifier need not name its answers; what it does not name has no vote.
        ([None, None, 0], [True, False, True], 1.0),
        ([None, None], [True, False], 0.0),
    ],
)
def test_majority_by_hand(votes, correct, expected):
    assert majority_at_k(votes, correct) == expected
    order = list(range(len(votes)))
    random.Random(0).shuffle(order)
    renamed = {vote: 7 - (vote or 0) for vote in votes if vote is not None} | {None: None}
    again = majority_at_k([renamed[votes[i]] for i in order], [correct[i] for i in order])
    assert again == expected, "neither the order nor the classes' numbers count"


def test_a_problems_values():
    found = problem_values(
        responses("cwuc", [0, 1, None, 0], [10, 20, 30, 40], [False, False, True, False])
    )
    assert found == {
        "avg@4": 2 / 4,
        # 1 - C(2, 2)/C(4, 2) = 5/6.
        "pass@2": pytest.approx(5 / 6, abs=1e-15),
        "pass@4": 1.0,
        "majority@4": 1.0,
        "response_length_mean": 25.0,
        "truncated_fraction": 1 / 4,
    }


def test_correct_responses_without_an_answer_leave_no_majority():
    unnamed = problem_values(responses("cwc", [None, None, None]))
    assert math.isnan(unnamed["majority@3"])
    named = problem_values(responses("cwc", [0, 1, 0]))
    expected = {**named, "avg@3": 2 / 3}
    del expected["majority@3"]
    assert means([named, unnamed]) == pytest.approx(expected)
    assert estimates([named, unnamed], 0).keys() == expected.keys()
    assert problem_values(responses("uu"))["majority@2"] == 0, "none is correct: none wins"


def test_a_time_out_is_not_correct():
    assert problem_values(responses("tt"))["avg@2"] == 0


def test_means_weigh_problems_alike():
    assert means([{"a": 0.25}, {"a": 1.0}, {"a": 0.0}]) == {"a": 1.25 / 3}


def test_an_interval_by_hand():
    # 30 problems, half solved: a mean drawn anew is Binomial(30, 1/2)/30, of which
    # P(<= 9) = 0.0214 and P(<= 10) = 0.0494: the 2.5 percentile is 10/30, by symmetry 20/30.
    found = estimates([{"a": float(i % 2)} for i in range(30)], seed=0)
    assert found == {"a": Estimate(0.5, pytest.approx(10 / 30), pytest.approx(20 / 30))}


def test_intervals_are_those_of_a_plain_loop():
    drawn = random.Random(3)
    problems = [{"a": drawn.random(), "b": drawn.random()} for _ in range(7)]
    found = estimates(problems, seed=5)
    generator = np.random.RandomState(5)
    for name in ("a", "b"):
        generator = np.random.RandomState(5)
        resampled = sorted(
            math.fsum(problems[i][name] for i in generator.randint(0, 7, size=7)) / 7
            for _ in range(10_000)
        )
        # numpy's linear percentile: place 0.025 * 9999 = 249.975, and 9749.025.
        low = resampled[249] + 0.975 * (resampled[250] - resampled[249])
        high = resampled[9749] + 0.025 * (resampled[9750] - resampled[9749])
        assert found[name].low == pytest.approx(low, abs=1e-12)
        assert found[name].high == pytest.approx(high, abs=1e-12)
        assert found[name].low < found[name].value < found[name].high


def test_the_seed_decides_and_one_problem_has_no_interval():
    problems = [{"a": i / 11} for i in range(11)]
    assert estimates(problems, 1) == estimates(problems, 1) != estimates(problems, 2)
    assert estimates([{"a": 0.25}], 0) == {"a": Estimate(0.25, None, None)}
    # More problems than one block of draws holds.
    many = estimates([{"a": float(i % 2)} for i in range(300)], 0)["a"]
    # Standard deviation sqrt(0.25/300) = 0.0289, 1.96 of them to each side.
    assert many.low == pytest.approx(0.5 - 0.0566, abs=0.005)
    assert many.high == pytest.approx(0.5 + 0.0566, abs=0.005)


def test_problems_that_agree_have_an_interval_with_a_width():
    """A bootstrap over them has none: 0 of 30 would look known exactly."""
    problem = {
        "avg@2": 0.0, "pass@2": 1.0, "majority@2": 0.5,
        "response_length_mean": 24.0, "reward_mean": -1.0,
    }  # fmt: skip
    found = estimates([problem] * 30, 0)
    # 0 of n: high = z^2/(n + z^2) = 3.8415/33.8415; n of n is its mirror image.
    assert found["avg@2"] == Estimate(0.0, 0.0, pytest.approx(0.1135, abs=1e-4))
    assert found["pass@2"] == Estimate(1.0, pytest.approx(0.8865, abs=1e-4), 1.0)
    # p = 1/2: 1/2 -+ z/2/sqrt(n + z^2) = 1/2 -+ 0.98/5.8173.
    assert found["majority@2"].low == pytest.approx(0.3315, abs=1e-4)
    assert found["majority@2"].high == pytest.approx(0.6685, abs=1e-4)
    # Nothing bounds what another problem would add.
    assert found["response_length_mean"] == Estimate(24.0, None, None)
    assert found["reward_mean"] == Estimate(-1.0, None, None)
    one_more = estimates([problem] * 29 + [{**problem, "response_length_mean": 54.0}], 0)
    assert one_more["response_length_mean"].low < one_more["response_length_mean"].high

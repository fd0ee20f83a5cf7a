"""What responses measure, and which prompts the rules keep; by hand.

Not exercised: where the responses come from (test_select.py).
"""

import pytest

from vapo_megatron.cli.select.command import number
from vapo_megatron.cli.select.rules import Measured, Rules, best_response, measure, select
from vapo_megatron.config import RewardConfig
from vapo_megatron.data.problems import Problem
from vapo_megatron.errors import ConfigError


def response(status, score=None, num_tokens=3, truncated=False):
    return {
        "status": status, "score": score, "answer": None, "num_tokens": num_tokens,
        "truncated": truncated,
    }  # fmt: skip


def line(*responses, verifier="math"):
    return {"verifier": verifier, "responses": list(responses)}


def test_what_is_measured():
    found = measure(
        line(response("correct", num_tokens=2), response("wrong", truncated=True),
             response("unparsable"), response("failed")),
        RewardConfig(),
    )  # fmt: skip
    assert found == ("math", 0.25, (1.0, 0.0, 0.0, None), (2, 3, 3, 3), 0.25)
    assert (found.score_mean, found.length_mean) == (1 / 3, 11 / 4)
    assert measure(line(response("timed_out")), RewardConfig()).score_mean is None


def test_a_score_is_the_verdicts_own_or_the_reward():
    judged = line(response("correct", 0.4), response("wrong", 0.9), response("unparsable"))
    assert measure(judged, RewardConfig())[1:3] == (1 / 3, (0.4, 0.9, 0.0))
    assert measure(judged, RewardConfig(from_score=[-2, 1]))[1:3] == (1 / 3, (0.4, 0.9, -2.0))


def test_scores_are_training_s_rewards_where_verifiers_have_scales():
    reward = RewardConfig(from_score=[-1, 1], scales={"code": {"low": 0, "high": 10}})
    judged = line(response("wrong", 2.5), response("correct"), verifier="code")
    # 2.5 of 10 is -.5 of [-1, 1]; a correct response without a score has the high end.
    assert measure(judged, reward)[:3] == ("code", 0.5, (-0.5, 1.0))


def test_an_episodes_score_is_its_reward():
    won = response("correct") | {"earned": 0.5}
    lost = response("wrong", 0.9, truncated=True) | {"earned": 0.25}
    # The sum of the turns' rewards is all that it gets.
    paid = response("correct") | {"earned": 3.0, "is_paid": True}
    failed = response("failed") | {"earned": 2.0}
    found = measure(line(won, lost, paid, failed, verifier="environment"), RewardConfig())
    assert found.scores == (1.5, -0.75, 3.0, None) and found.pass_rate == 0.5
    reward = RewardConfig(from_score=[0, 1])
    assert measure(line(won, lost, paid), reward).scores == (1.5, 1.15, 3.0)


def measured(*rows):
    """Of (pass rate, score) and perhaps a verifier each."""
    return {
        i: Measured(*(verifier or ["math"]), rate, (score,), (1,), 0.0)
        for i, (rate, score, *verifier) in enumerate(rows)
    }


PROBLEMS = [Problem(str(i), "", {"domain": "ab"[i % 2]}) for i in range(8)]


def kept(rules, found, problems=PROBLEMS):
    return select(found, problems[: max(found) + 1], rules).kept


def test_a_window_of_pass_rates_has_its_ends():
    found = measured(*[(rate / 4, 0.0) for rate in range(5)])
    assert kept(Rules(pass_rate=(0.25, 0.75)), found) == [1, 2, 3]
    assert kept(Rules(pass_rate=(0.0, 0.0)), found) == [0]
    assert kept(Rules(), found) == [0, 1, 2, 3, 4]


def test_the_hardest_are_those_of_the_lowest_scores_the_first_of_equal_ones():
    found = measured((0, 0.5), (0, 0.1), (0, None), (0, 0.1), (0, 0.9), (0, 0.1))
    assert kept(Rules(hardest=2), found) == [1, 3]
    assert kept(Rules(hardest=4), found) == [0, 1, 3, 5]
    assert kept(Rules(hardest=99), found) == [0, 1, 3, 4, 5], "without a score there is no rank"


def test_the_hardest_may_be_a_share_of_those_that_are_left():
    found = measured((0, 0.5), (0, 0.1), (1, 0.0), (0, 0.1), (0, 0.9), (0, 0.7))
    assert kept(Rules(hardest=0.5), found) == [1, 2, 3]
    # Of the five whose pass rate fits two fifths, which are a little less than .4 * 5.
    assert kept(Rules(pass_rate=(0, 0.5), hardest=0.4), found) == [1, 3]
    assert kept(Rules(hardest=0.01), found) == [2], "at least one"
    assert kept(Rules(hardest=0.99), found) == [0, 1, 2, 3, 5], "rounded down"
    assert kept(Rules(hardest=1.0), found) == list(range(6)) and kept(Rules(hardest=1), found) == [
        2
    ]
    told = select(found, PROBLEMS[:6], Rules(hardest=0.5)).dropped
    assert told == {"not among the 3 of the lowest scores": 3}
    # On the command line a whole number is one of prompts.
    assert [(number(text), type(number(text))) for text in ("3", "1", "0.25", "1.0")] == [
        (3, int), (1, int), (0.25, float), (1.0, float),
    ]  # fmt: skip


def test_the_best_response_has_the_highest_score_of_its_own():
    texts = [
        response(*given) | {"text": name}
        for name, given in {
            "a": ("wrong", 0.2), "b": ("correct", None), "c": ("wrong", 0.7), "d": ("correct", 0.7),
            "e": ("failed", 9.0), "f": ("timed_out", None), "g": ("unparsable", -1.0),
        }.items()
    ]  # fmt: skip
    assert best_response(line(*texts)) == "c", "of equal ones the first"
    assert best_response(line(texts[0], texts[6])) == "a"
    assert best_response(line(texts[6])) == "g"
    assert best_response(line(texts[1], texts[4], texts[5])) is None


def test_scores_of_different_scales_are_standardized():
    # Verifier x gives 0, 10, 20, 30 and y .1, .2, .3, .4: the two lowest of each are as hard.
    scores = [(10 * (i // 2), 0.1 + 0.1 * (i // 2))[i % 2] for i in range(8)]
    found = measured(*[(0, score, "xy"[i % 2]) for i, score in enumerate(scores)])
    assert kept(Rules(hardest=4), found) == [0, 1, 2, 3]
    of_one = measured(*[(0, score) for score in scores])
    assert kept(Rules(hardest=4), of_one) == [0, 1, 3, 5], "as they are, y's are lower"
    assert kept(Rules(hardest=4, within="domain"), of_one) == [0, 1, 2, 3]
    # A verifier that judges one prompt, or always alike, says nothing of its hardness.
    constant = measured((0, 7.0, "x"), (0, 0.2, "y"), (0, 7.0, "x"), (0, 0.1, "y"))
    assert kept(Rules(hardest=2), constant) == [0, 3]


def test_rules_apply_in_order_and_count_what_they_drop():
    found = measured((0.0, 0.0), (0.5, 0.9), (0.5, 0.3), (1.0, 1.0), (0.5, 0.6))
    del found[4]
    rules = Rules(0.8, (0.1, 0.9), 1)
    selection = select(found, PROBLEMS[:5], rules)
    assert selection.kept == [2]
    assert selection.dropped == {
        "near-duplicates": 1, "pass rate outside [0.1, 0.9]": 2,
        "not among the 1 of the lowest scores": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Rules(similarity=0), r"--drop-duplicates=0 must be in \(0, 1\]; change it"),
        (Rules(similarity=80), "--drop-duplicates=80 must be in"),
        (Rules(pass_rate=(0.9, 0.1)), "--pass-rate 0.9 0.1 must be LOW HIGH, 0 <= LOW <= HIGH <="),
        (Rules(pass_rate=(10, 90)), "--pass-rate 10 90 must be"),
        (Rules(hardest=0), "--hardest=0 must be at least 1; change it"),
        (
            Rules(hardest=0.0),
            r"--hardest=0 must be a share in \(0, 1\], or a whole number of promp",
        ),
        (Rules(hardest=1.5), "--hardest=1.5 must be a share in"),
        (Rules(hardest=float("nan")), "--hardest=nan must be a share in"),
        (Rules(within="domain"), "--within=domain needs --hardest"),
    ],
)
def test_numbers_out_of_range(rules, message):
    with pytest.raises(ConfigError, match=message):
        rules.check()

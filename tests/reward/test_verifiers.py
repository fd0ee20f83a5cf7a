"""Verifiers by name, and by a row's column. Not exercised: what each of them finds correct."""

import pytest

from tests.reward.own_verifiers import Contains
from vapo_megatron.config import RewardConfig
from vapo_megatron.config.reward import BUILT_IN_VERIFIERS
from vapo_megatron.errors import ConfigError
from vapo_megatron.reward.built_in import BUILT_IN
from vapo_megatron.reward.reward_model import reward_model_refusals
from vapo_megatron.reward.verifier import Problem
from vapo_megatron.reward.verifiers import Verifiers

OWN = "tests.reward.own_verifiers"
REWARD = RewardConfig(
    num_workers=1,
    timeout_seconds=60.0,
    verifiers={
        "loose": {"use": f"{OWN}:Contains", "ignore_case": True},
        "strict": {"use": f"{OWN}:Strict"},
        "sums": {"use": "math"},
    },
)


def statuses(verifiers, responses, problems):
    return [v.status for v in verifiers.score(responses, problems)]


def test_the_names_of_the_configuration_are_those_that_are_built():
    assert set(BUILT_IN) == set(BUILT_IN_VERIFIERS)


def test_each_row_is_judged_by_the_verifier_that_it_names():
    problems = [
        Problem("", "1/2"),
        Problem("", "ADA", {"verifier": "loose"}),
        Problem("", "1/2", {"verifier": "strict"}),
        Problem("", "1/2", {"verifier": "sums"}),
        Problem("", "ada", {"verifier": "loose"}),
        Problem("", "1/2", {"verifier": None}),
    ]
    responses = ["Answer: 0.5", "it is Ada", "Answer: 0.5", "Answer: 0.5", "Bob", "Answer: 3"]
    with Verifiers(REWARD) as verifiers:
        found = statuses(verifiers, responses, problems)
        assert found == ["correct", "correct", "wrong", "correct", "wrong", "wrong"]
        assert list(verifiers.score([], [])) == []
        pairs = [(problems[0], "0.25", "1/4"), (problems[1], "ab", "ac"), (problems[2], "ab", "ac")]
        assert verifiers.same_answers(pairs) == [True, False, True]


def test_unusable_problems_are_named_with_what_is_wrong():
    problems = [
        Problem("", "7"),
        Problem("", "???"),
        Problem("", "", {"verifier": "strict"}),
        Problem("", "", {"verifier": "loose"}),
        Problem("", "7", {"verifier": "magic"}),
        Problem("", ""),
    ]
    with Verifiers(REWARD) as verifiers:
        assert verifiers.unusable(problems) == {
            1: "has the answer '???', which the verifier cannot parse",
            2: "is refused by the verifier strict: has no ground truth",
            4: "has the verifier 'magic', which is none of math, exact, code, "
            "reasoning_gym, judge, pairwise, reward_model, environment, loose, strict, sums, "
            "hybrid",
            5: "has no ground truth",
        }


def test_rows_of_the_reward_model_are_refused_where_it_cannot_judge():
    reward = RewardConfig(
        num_workers=1, verifier="taste", verifiers={"taste": {"use": "reward_model"}}
    )
    problems = [Problem(""), Problem("", "7", {"verifier": "math"}),
                Problem("", "", {"verifier": "reward_model"})]  # fmt: skip
    training, held_out = reward_model_refusals(has_reward_model=False)
    assert "model.reward_hf_path" in training and "evaluation" in held_out
    assert reward_model_refusals(has_reward_model=True) == (None, held_out)
    with Verifiers(reward) as verifiers:
        assert verifiers.unusable(problems) == {}
        assert verifiers.unusable(problems, "is not judged") == dict.fromkeys(
            (0, 2), "is not judged"
        )
    with Verifiers(reward, Contains()) as verifiers:
        assert verifiers.unusable(problems, "is not judged") == {2: "is not judged"}


def test_the_default_is_the_configured_one_or_the_one_given():
    problems = [Problem("", "ada"), Problem("", "0.5", {"verifier": "math"})]
    own = REWARD.model_copy(update={"verifier": f"{OWN}:Contains"})
    with Verifiers(own) as verifiers:
        assert statuses(verifiers, ["ada!", "Answer: 1/2"], problems) == ["correct"] * 2
    with Verifiers(REWARD, Contains(ignore_case=True)) as verifiers:
        assert statuses(verifiers, ["ADA!", "Answer: 1/2"], problems) == ["correct"] * 2


def test_a_score_decides_what_is_correct_where_the_configuration_says_so():
    """For training and evaluation alike; Contains' score is the answer's share of the text."""
    problems = [Problem("", "ada", {"verifier": name}) for name in ("loose", "strict", "math")]
    responses = ["ada!", "ada!", "Answer: ada"]
    scored = {"from_score": [0.0, 2.0], "correct_from": 1.0}
    given = {**scored, "scales": {"strict": {"low": 0.0, "high": 1.0}}}
    with Verifiers(RewardConfig(**{**REWARD.model_dump(), **scored})) as verifiers:
        assert statuses(verifiers, responses, problems) == ["wrong", "wrong", "correct"]
    with Verifiers(RewardConfig(**{**REWARD.model_dump(), **given})) as verifiers:
        # 3/4 of the text is 1.5 of a range that ends at 2.
        assert statuses(verifiers, responses, problems) == ["wrong", "correct", "correct"]
    narrow = {"from_score": [0.0, 0.5]}
    with Verifiers(RewardConfig(**{**REWARD.model_dump(), **narrow})) as verifiers:
        assert statuses(verifiers, responses, problems) == ["failed", "failed", "correct"]
    # Of the one given in place of the default, by the default's name.
    given = {**scored, "scales": {"math": {"low": 0.0, "high": 1.0}}}
    with Verifiers(RewardConfig(**{**REWARD.model_dump(), **given}), Contains()) as verifiers:
        assert statuses(verifiers, ["ada!"], [Problem("", "ada")]) == ["correct"]


def test_a_verifier_that_no_row_names_is_loaded_too():
    reward = RewardConfig(num_workers=1, verifiers={"later": {"use": f"{OWN}:Absent"}})
    with Verifiers(reward) as verifiers, pytest.raises(ConfigError, match="later cannot be loaded"):
        verifiers.load()


def test_an_option_that_a_built_in_verifier_has_not_is_refused():
    reward = RewardConfig(verifiers={"math": {"tolerance": 1e-3}})
    with Verifiers(reward) as verifiers, pytest.raises(ConfigError, match="math.tolerance is no"):
        verifiers.score(["1"], [Problem("", "1")])

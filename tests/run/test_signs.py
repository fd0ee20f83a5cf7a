"""Signs that nothing is learned: on which rows they are, and when they say what to look at.

Not exercised: where the metrics come from (test_step_metrics.py), and what is shown of signs
(test_progress.py, test_output.py).
"""

import pytest

from vapo_megatron.config import VapoConfig
from vapo_megatron.run.signs import Signs, about_value_error

HEALTHY = {
    "reward/mean": 0.1, "reward/std": 0.9, "reward/equal_groups_fraction": 0.25,
    "reward/unparsable_fraction": 0.5, "reward/correct_fraction": 0.5,
    "rollout/truncated_fraction": 0.1, "reward/unused_score_fraction": 0.0,
}  # fmt: skip
EQUAL = {"reward/std": 0.0, "reward/mean": -1.0, "reward/equal_groups_fraction": 1.0}
UNPARSABLE = {"reward/unparsable_fraction": 1.0}
UNUSED = {"reward/unused_score_fraction": 0.25}
CONFIG = VapoConfig(logging={"run_dir": "runs/x"}, reward={"verifier": "exact"})
GRPO = VapoConfig(
    algorithm={"advantage_estimator": "grpo", "value_pretraining_steps": 0, "positive_lm_coef": 0}
)


def labels(config=CONFIG, **changes):
    return Signs(config).of({**HEALTHY, **changes})[0]


def test_each_sign_is_on_its_steps_alone():
    assert labels() == [] and Signs(CONFIG).of({})[0] == []
    assert labels(**EQUAL) == ["all rewards equal"]
    assert labels(**UNPARSABLE) == ["no answer parsable"]
    assert labels(**UNUSED) == ["scores unused (reward.from_score)"]
    assert labels(**EQUAL, **UNPARSABLE) == ["all rewards equal", "no answer parsable"]
    # Nearly is not all.
    nearly = {"reward/std": 1e-3, "reward/unparsable_fraction": 0.999}
    assert labels(**nearly) == []


def test_equal_rewards_in_every_group_matter_without_a_critic():
    every_group = {"reward/equal_groups_fraction": 1.0}
    assert labels(GRPO, **every_group) == ["rewards equal in every group"]
    assert labels(CONFIG, **every_group) == [], "a critic compares with other groups, too"
    assert labels(GRPO, **EQUAL) == ["all rewards equal"], "it says as much"


def told(*rows, config=CONFIG):
    """What is explained after each row."""
    signs = Signs(config)
    return [signs.of({**HEALTHY, **row})[1] for row in rows]


def test_three_steps_in_a_row_say_what_to_look_at_once():
    found = told(EQUAL, EQUAL, {}, EQUAL, EQUAL, EQUAL, EQUAL, {}, *[EQUAL] * 3)
    assert [len(texts) for texts in found] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    (text,) = found[5]
    assert text.startswith("3 steps in a row: all rewards were equal (-1), from which no response")
    for words in ("runs/x/rollouts", "reward.verifier=exact", "data.answer_column"):
        assert words in text
    assert "truncated" not in text and "\n" not in text


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**EQUAL, "reward/correct_fraction": 1.0}, "all are correct, so take harder problems"),
        ({**EQUAL, "rollout/truncated_fraction": 1.0}, "100% of them were truncated: look at roll"),
        (UNPARSABLE, "rollout.stop_token_ids"),
        ({**UNPARSABLE, "rollout/truncated_fraction": 0.75}, "75% of them were truncated"),
        (UNUSED, "set reward.from_score=[LOW, HIGH]"),
    ],
)
def test_what_to_look_at(row, words):
    *before, (text,) = told(row, row, row)
    assert before == [[], []] and words in text


def test_signs_last_each_for_themselves():
    both = {**EQUAL, **UNPARSABLE}
    found = told(EQUAL, both, both, UNPARSABLE)
    assert [len(texts) for texts in found] == [0, 0, 1, 1]
    assert "algorithm.dynamic_sampling" in told(
        *[{"reward/equal_groups_fraction": 1.0}] * 3, config=GRPO
    )[2][0]  # fmt: skip


def test_responses_that_are_not_kept_are_not_pointed_at():
    config = VapoConfig(logging={"run_dir": "runs/x", "rollout_groups": 0})
    text = told(EQUAL, EQUAL, EQUAL, config=config)[2][0]
    assert "logging.rollout_groups=1" in text and "runs/x" not in text


def test_values_that_are_off_when_pretraining_ends():
    config = VapoConfig()
    row = {"critic/value_error_mean": 0.75, "critic/return_std": 0.5}
    (text,) = about_value_error(row, config)
    assert "that are 0.75 too high in the mean" in text and "of the returns of 0.5:" in text
    assert "advantages then punish ending a response" in text
    assert "optimizer.critic_learning_rate=2e-06, or take more" in text
    (text,) = about_value_error({**row, "critic/value_error_mean": -0.3}, config)
    assert "that are 0.3 too low in the mean" in text
    assert "advantages then reward ending a response" in text
    assert about_value_error({**row, "critic/value_error_mean": 0.2}, config) == []
    assert about_value_error({}, config) == []


def test_values_that_started_at_the_mean_return_are_not_told_to():
    row = {"critic/value_error_mean": 0.75, "critic/return_std": 0.5}
    told = {
        bias: about_value_error(row, VapoConfig(model={"value_head_bias": bias}))[0]
        for bias in ("none", "mean_return")
    }
    assert "; set model.value_head_bias=mean_return, raise opt" in told["none"]
    assert "value_head_bias" not in told["mean_return"]
    assert "the 512 prompts of a step may differ that much" in told["mean_return"]
    assert "by chance, and more of them less; or raise opt" in told["mean_return"]

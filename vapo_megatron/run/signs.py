"""Signs in a step's metrics that little or nothing is learned, and where to look.

Every affected step's line shows the sign; after three such steps in a row advice follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vapo_megatron.algorithm.value_pretraining import error_is_large
from vapo_megatron.config import VapoConfig

IN_A_ROW = 3
"""Steps with a sign before it is explained."""

Row = Mapping[str, Any]
"""A step's metrics; a sign whose metrics are missing is not there."""


class Sign(NamedTuple):
    """Something that a healthy step does not have."""

    label: str
    """On the step's line."""
    is_there: Callable[[Row, VapoConfig], bool]
    look_at: Callable[[Row, VapoConfig], str]
    """What it means, and what to look at."""


def _has_equal_groups(row: Row, config: VapoConfig) -> bool:
    """Group-relative advantages are then all 0, though rewards differ from group to group."""
    has_critic = "critic" in config.algorithm.trained_roles
    is_equal = row.get("reward/equal_groups_fraction") == 1
    return is_equal and not has_critic and row.get("reward/std") != 0


def _about_equal_rewards(row: Row, config: VapoConfig) -> str:
    mean = row.get("reward/mean")
    value = "" if mean is None else f" ({mean:g})"
    meaning = f"all rewards were equal{value}, from which no response is known to be better"
    if row.get("reward/correct_fraction") == 1:
        return f"{meaning}: all are correct, so take harder problems (vapo select --pass-rate)"
    return (
        f"{meaning}; look at {_responses(config)}, reward.verifier={config.reward.verifier} (does "
        "it judge such ground truths?), data.answer_column, what the prompts ask for, and how hard "
        f"the problems are{_truncated(row)}"
    )


def _about_equal_groups(row: Row, config: VapoConfig) -> str:
    estimator = config.algorithm.advantage_estimator
    return (
        "all rewards of each group were equal, so that all advantages of "
        f"algorithm.advantage_estimator={estimator} are 0; look at {_responses(config)}, "
        "rollout.temperature, a larger algorithm.group_size, algorithm.dynamic_sampling=true, and "
        "problems of which some responses are correct (vapo select --pass-rate)"
    )


def _about_unparsable(row: Row, config: VapoConfig) -> str:
    return (
        "no response had an answer that its verifier could read; look at "
        f"{_responses(config)}, what the prompts ask for (math reads \\boxed{{}} and 'Answer:'), "
        f"reward.verifier={config.reward.verifier}, and rollout.stop_token_ids{_truncated(row)}"
    )


_UNUSED_SCORES = (
    "verdicts had scores beyond correct and wrong that rewards do not show, because "
    "reward.from_score is not set; set reward.from_score=[LOW, HIGH], the range of the scores, "
    "if they are to be the rewards"
)


def _responses(config: VapoConfig) -> str:
    if not config.logging.rollout_groups:
        return "responses (with logging.rollout_groups=1)"
    return f"the responses in {config.logging.run_dir}/rollouts"


def _truncated(row: Row) -> str:
    share = row.get("rollout/truncated_fraction") or 0
    if share < 0.5:
        return ""
    return f"; {share:.0%} of them were truncated: look at rollout.max_response_tokens, too"


SIGNS = (
    Sign("all rewards equal", lambda row, _: row.get("reward/std") == 0, _about_equal_rewards),
    Sign("rewards equal in every group", _has_equal_groups, _about_equal_groups),
    Sign(
        "no answer parsable",
        lambda row, _: row.get("reward/unparsable_fraction") == 1,
        _about_unparsable,
    ),
    Sign(
        "scores unused (reward.from_score)",
        lambda row, _: row.get("reward/unused_score_fraction", 0) > 0,
        lambda row, config: _UNUSED_SCORES,
    ),
)


def about_value_error(row: Row, config: VapoConfig) -> list[str]:
    """Return what to know at the end of value pretraining where V is wrong in the mean."""
    if "critic/value_error_mean" not in row:
        return []
    error, spread = row["critic/value_error_mean"], row["critic/return_std"]
    if not error_is_large(error, spread):
        return []
    start = "set model.value_head_bias=mean_return, "
    if config.model.value_head_bias == "mean_return":
        # They started without an error, at the mean of the first step's few prompts.
        start = (
            f"the {config.algorithm.num_prompts} prompts of a step may differ that much from the "
            "first step's by chance, and more of them less; or "
        )
    return [
        f"warning: value pretraining ends with values that are {abs(error):.2g} too "
        f"{'high' if error > 0 else 'low'} in the mean (critic/value_error_mean), against a "
        f"standard deviation of the returns of {spread:.2g}: with lambda below 1 advantages then "
        f"{'punish' if error > 0 else 'reward'} ending a response; {start}raise "
        f"optimizer.critic_learning_rate={config.optimizer.critic_learning_rate:g}, or take more "
        f"algorithm.value_pretraining_steps={config.algorithm.value_pretraining_steps}"
    ]


class Signs:
    """Looks for SIGNS step by step, and counts how long each has lasted."""

    def __init__(self, config: VapoConfig) -> None:
        """Of a run's configuration, which the explanations name."""
        self._config = config
        self._lasted = [0] * len(SIGNS)
        self._explained: set[int] = set()

    def of(self, row: Row) -> tuple[list[str], list[str]]:
        """Return (labels for a training step's line, explanations to print, each once a run)."""
        labels, explanations = [], []
        for i, sign in enumerate(SIGNS):
            is_there = sign.is_there(row, self._config)
            self._lasted[i] = self._lasted[i] + 1 if is_there else 0
            if is_there:
                labels.append(sign.label)
            if self._lasted[i] >= IN_A_ROW and i not in self._explained:
                self._explained.add(i)
                about = sign.look_at(row, self._config)
                explanations.append(f"{IN_A_ROW} steps in a row: {about}")
        return labels, explanations

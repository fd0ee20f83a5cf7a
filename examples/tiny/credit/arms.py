"""The arms on locks and keys as data, by form of the task."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ablation.arms import (
    NO_CLIP_HIGHER,
    NO_DECOUPLED_GAE,
    NO_DECOUPLED_GAE_95,
    NO_GROUP_SAMPLING,
    NO_LENGTH_ADAPTIVE,
    NO_POSITIVE_LM,
    NO_TOKEN_LEVEL,
    NO_VALUE_CHECKPOINT,
    NO_VALUE_PRETRAINING,
    VAPO,
)
from runner.arms import Arm, Table, task_table

LM = "algorithm.positive_lm_coef=0.1"
ORACLE = ("--oracle",)
MAIN = ("vapo", "dapo", "grpo")
"""The arms of --quick and of the charts' first lines."""


def _curve(arm: Arm, policy_steps: int) -> Arm:
    """Return the arm with a length of its own, evaluated often enough for a curve."""
    return dataclasses.replace(arm, policy_steps=policy_steps, evaluated_every=5)


def _table(form: str, arms: Mapping[str, Arm], *configs: str, **more: Arm) -> Table:
    return task_table(
        form, "credit/keys.py", ("keys_tiny.yaml", *configs), arms, read=512, updates=6,
        more_arms=more, base_seconds=350.0, data_sources=("credit/keys.py", "task.py"),
        trainer=("credit/train.py", "credit/measures.py", "credit/values.py", "credit/keys.py"),
    )  # fmt: skip


TABLES = {
    "keys": _table(
        "keys",
        {
            # Long enough for 4,000 responses, which are compared.
            "vapo": _curve(VAPO, 55),
            "dapo": _curve(Arm("DAPO", "50", (NO_VALUE_CHECKPOINT,), "dapo"), 40),
            "grpo": _curve(Arm("GRPO", "47", (NO_VALUE_CHECKPOINT,), "grpo"), 65),
            "oracle": Arm("VAPO with exact values", options=ORACLE),
            "dapo_lm": Arm("DAPO with the LM loss", "", (NO_VALUE_CHECKPOINT, LM), "dapo"),
            "grpo_lm": Arm("GRPO with the LM loss", "", (NO_VALUE_CHECKPOINT, LM), "grpo"),
            "dapo_no_dynamic": Arm(
                "DAPO without dynamic sampling", "",
                (NO_VALUE_CHECKPOINT, "algorithm.dynamic_sampling=false"), "dapo",
            ),
            "no_positive_lm": NO_POSITIVE_LM,
            "no_value_pretraining": NO_VALUE_PRETRAINING,
            "no_decoupled_gae": NO_DECOUPLED_GAE,
            "no_decoupled_gae_95": NO_DECOUPLED_GAE_95,
            # Value pretraining always has Monte-Carlo targets; only without it does all that the
            # critic knows come from this lambda.
            "no_values_no_decoupled_gae": Arm(
                "without value pretraining and decoupled GAE", "",
                (NO_VALUE_CHECKPOINT, *NO_DECOUPLED_GAE.changes),
            ),
            "no_group_sampling": NO_GROUP_SAMPLING,
        },
        no_length_adaptive=NO_LENGTH_ADAPTIVE,
        no_clip_higher=NO_CLIP_HIGHER,
    ),
    # Lengths differ by four, so a mean over each response first weighs their tokens differently.
    "keys_mixed": _table(
        "keys_mixed",
        {"vapo": VAPO, "no_token_level": NO_TOKEN_LEVEL},
        no_group_sampling=NO_GROUP_SAMPLING,
        no_length_adaptive=NO_LENGTH_ADAPTIVE,
        no_decoupled_gae=NO_DECOUPLED_GAE,
        no_decoupled_gae_95=NO_DECOUPLED_GAE_95,
    ),
    # With exact values, so that only the bound differs, and no noise of a critic takes the skill of
    # copying away, which the positive-example loss keeps elsewhere.
    "keys_rare": _table(
        "keys_rare",
        {
            "vapo": Arm("VAPO with exact values", "", (NO_VALUE_CHECKPOINT,), options=ORACLE),
            "no_clip_higher": Arm(
                "and without clip-higher", "46", (NO_VALUE_CHECKPOINT, *NO_CLIP_HIGHER.changes),
                options=ORACLE,
            ),
        },
        "keys_rare.yaml",
    ),
}  # fmt: skip

"""The arms of the ablation as data: what each changes, and what the paper found.

Every arm starts from the same settings (`CONFIGS`, and the files of its seed) and changes what is
named here, nothing else. Without its value pretraining the critic starts from the reward model.
"""

from __future__ import annotations

import dataclasses

CONFIGS = ("tiny.yaml", "ablation_tiny.yaml")
"""In examples/configs; later ones win."""

VALUE_STAGE = (
    "algorithm.stage=value_pretraining",
    "algorithm.value_pretraining_steps=20",
    "evaluation.path=null",
)
"""How a seed's value checkpoint is made, with the same settings otherwise."""

NO_VALUE_CHECKPOINT = "model.critic_checkpoint=null"
NO_CRITIC = (NO_VALUE_CHECKPOINT, "model.critic_hf_path=null")


@dataclasses.dataclass(frozen=True)
class Arm:
    """One algorithm of the comparison."""

    title: str
    paper: str
    """AIME 2024 avg@32 of VAPO's table 1 (arXiv 2504.05118), Qwen2.5-32B; empty: not in it."""
    changes: tuple[str, ...] = ()
    """section.field=value, on top of what all arms share."""
    recipe: str | None = None
    """A file of examples/configs/algorithms, read before the changes."""


ARMS: dict[str, Arm] = {
    "vapo": Arm("VAPO", "60"),
    "ppo": Arm("vanilla PPO", "5", (NO_VALUE_CHECKPOINT,), "ppo"),
    "no_value_pretraining": Arm("without value pretraining", "11", (NO_VALUE_CHECKPOINT,)),
    "no_decoupled_gae": Arm(
        "without decoupled GAE (one adaptive lambda)", "33",
        ("algorithm.lambda_critic=same_as_actor",),
    ),
    "no_length_adaptive": Arm(
        "without length-adaptive GAE", "45", ("algorithm.lambda_actor=0.95",)
    ),
    "no_clip_higher": Arm("without clip-higher", "46", ("algorithm.clip_high=0.2",)),
    "no_token_level": Arm(
        "without token-level loss", "53", ("algorithm.loss_aggregation=sample",)
    ),
    "no_positive_lm": Arm(
        "without positive-example LM loss", "54", ("algorithm.positive_lm_coef=0",)
    ),
    "no_group_sampling": Arm("without group sampling", "55", ("algorithm.group_size=1",)),
    "grpo": Arm("GRPO", "47", NO_CRITIC, "grpo"),
    "dapo": Arm("DAPO", "50", NO_CRITIC, "dapo"),
}  # fmt: skip
"""The main table, in the order in which a seed's arms are run."""

EXTRA_ARMS: dict[str, Arm] = {
    "no_decoupled_gae_95": Arm(
        "without decoupled GAE (0.95 for both)", "33",
        ("algorithm.lambda_critic=0.95", "algorithm.lambda_actor=0.95"),
    ),
}  # fmt: skip
"""Further readings, run where --arms names them."""

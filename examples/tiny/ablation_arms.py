"""The arms of the ablation as data: what each changes, and what the paper found.

Every arm of a table starts from the same settings (the table's, and the files of its seed) and
changes what is named here, nothing else. Without its value pretraining the critic starts from the
reward model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

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


@dataclasses.dataclass(frozen=True)
class Table:
    """Arms that are compared, and what they share."""

    configs: tuple[str, ...]
    """In examples/configs; later ones win."""
    arms: Mapping[str, Arm]
    """By name, in the order in which a seed's arms are run."""
    more_arms: Mapping[str, Arm] = dataclasses.field(default_factory=dict)
    """Further readings, run where --arms names them."""
    has_reward_model: bool = True
    value_steps: int = 6
    """Steps of the run that makes a seed's value checkpoint, with the same settings otherwise. Few:
    a critic that is still biased shows what the positive-example loss is for."""
    notes: tuple[str, ...] = ()
    """Paragraphs under the table: what does not show and why, as it was measured."""


VAPO = Arm("VAPO", "60")
NO_DECOUPLED_GAE = Arm(
    "without decoupled GAE (one adaptive lambda)", "33", ("algorithm.lambda_critic=same_as_actor",)
)
NO_DECOUPLED_GAE_95 = Arm(
    "without decoupled GAE (0.95 for both)", "33",
    ("algorithm.lambda_critic=0.95", "algorithm.lambda_actor=0.95"),
)  # fmt: skip
NO_LENGTH_ADAPTIVE = Arm("without length-adaptive GAE", "45", ("algorithm.lambda_actor=0.95",))
NO_POSITIVE_LM = "without positive-example LM loss"
NO_CLIP_HIGHER = Arm("without clip-higher", "46", ("algorithm.clip_high=0.2",))


def _besides(arm: Arm) -> Arm:
    """Return the arm on top of another change that the table's first arm names."""
    return dataclasses.replace(arm, title=f"and {arm.title}", paper="")


TABLES = {
    "short": Table(
        configs=("tiny.yaml", "ablation_tiny.yaml"),
        arms={
            "vapo": VAPO,
            "ppo": Arm("vanilla PPO", "5", (NO_VALUE_CHECKPOINT,), "ppo"),
            "no_value_pretraining": Arm("without value pretraining", "11", (NO_VALUE_CHECKPOINT,)),
            "no_decoupled_gae": NO_DECOUPLED_GAE,
            "no_length_adaptive": NO_LENGTH_ADAPTIVE,
            "no_clip_higher": NO_CLIP_HIGHER,
            "no_token_level": Arm(
                "without token-level loss", "53", ("algorithm.loss_aggregation=sample",)
            ),
            "no_positive_lm": Arm(NO_POSITIVE_LM, "54", ("algorithm.positive_lm_coef=0",)),
            "no_group_sampling": Arm("without group sampling", "55", ("algorithm.group_size=1",)),
            "grpo": Arm("GRPO", "47", NO_CRITIC, "grpo"),
            "dapo": Arm("DAPO", "50", NO_CRITIC, "dapo"),
        },
        more_arms={"no_decoupled_gae_95": NO_DECOUPLED_GAE_95},
    ),
    "long": Table(
        configs=("tiny.yaml", "ablation_tiny.yaml", "ablation_long.yaml"),
        arms={
            # ablation_long.yaml is without that loss; the paper left out one technique at a time.
            "vapo": Arm(f"VAPO {NO_POSITIVE_LM}", "54"),
            "no_decoupled_gae": _besides(NO_DECOUPLED_GAE),
            "no_decoupled_gae_95": _besides(NO_DECOUPLED_GAE_95),
            "no_length_adaptive": _besides(NO_LENGTH_ADAPTIVE),
            "no_clip_higher": _besides(NO_CLIP_HIGHER),
        },
        has_reward_model=False,
        value_steps=10,
    ),
}
"""By the form of the task."""

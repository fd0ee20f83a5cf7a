"""The ablation's arms as data, by form of the task: their changed fields, and the paper's results.

All arms of a table share the table's settings and the files of their seed, and differ only in the
fields listed here. Without value pretraining, the critic starts from the reward model.
"""

from __future__ import annotations

import dataclasses

from runner.arms import Arm, Table

NO_VALUE_CHECKPOINT = "model.critic_checkpoint=null"
NO_CRITIC = (NO_VALUE_CHECKPOINT, "model.critic_hf_path=null")

VAPO = Arm("VAPO", "60")
NO_VALUE_PRETRAINING = Arm("without value pretraining", "11", (NO_VALUE_CHECKPOINT,))
NO_DECOUPLED_GAE = Arm(
    "without decoupled GAE (one adaptive lambda)", "33", ("algorithm.lambda_critic=same_as_actor",)
)
NO_DECOUPLED_GAE_95 = Arm(
    "without decoupled GAE (0.95 for both)", "33",
    ("algorithm.lambda_critic=0.95", "algorithm.lambda_actor=0.95"),
)  # fmt: skip
NO_LENGTH_ADAPTIVE = Arm("without length-adaptive GAE", "45", ("algorithm.lambda_actor=0.95",))
NO_CLIP_HIGHER = Arm("without clip-higher", "46", ("algorithm.clip_high=0.2",))
NO_TOKEN_LEVEL = Arm("without token-level loss", "53", ("algorithm.loss_aggregation=sample",))
NO_POSITIVE_LM = Arm("without positive-example LM loss", "54", ("algorithm.positive_lm_coef=0",))
NO_GROUP_SAMPLING = Arm("without group sampling", "55", ("algorithm.group_size=1",))

# Both with the table's learning rate. A critic without a range, or with an optimizer of all its
# weights, is not one to start from: BPCO pretrains its own for as many steps as the seed's has.
TABLES_RATE = "optimizer.critic_learning_rate=5.0e-4"
SAO = Arm(
    "SAO", "",
    ("algorithm.value_pretraining_steps=0", "model.critic_checkpoint_optimizer=false", TABLES_RATE),
    "sao",
)  # fmt: skip
BPCO = Arm("BPCO", "", (*NO_CRITIC, "algorithm.value_pretraining_steps=6", TABLES_RATE), "bpco")

CORRECTIONS = {
    "recomputed": (),
    "TIS": ("algorithm.sampler_correction=tis",),
    "DIS": ("algorithm.policy_loss=dis",),
}
"""Fields of what the learner does about older weights."""


def _besides(arm: Arm) -> Arm:
    """Return the arm with a title that says it is added to the change of the table's first arm."""
    return dataclasses.replace(arm, title=f"and {arm.title}", paper="")


def _disaggregated(lag: int) -> Arm:
    """Return an arm of which one process trains and one samples."""
    overrides = (
        "parallel.world_size=1", "rollout.placement=disaggregated", "rollout.num_processes=1",
        "rollout.max_num_sequences=128", f"rollout.lag={lag}",
    )  # fmt: skip
    return Arm(f"disaggregated, lag {lag}", "", overrides)


def _lags() -> dict[str, Arm]:
    """Return the arms of every correction at every lag; vapo is recomputed without a lag."""
    arms = {}
    for name, changes in CORRECTIONS.items():
        for lag in (0, 1, 4, 16):
            lags = (f"rollout.lag={lag}",) if lag else ()
            key = f"{name.lower()}_{lag}" if changes or lag else "vapo"
            arms[key] = Arm(f"{name}, lag {lag}", "", (*changes, *lags))
    return arms


def _optimizers() -> dict[str, Arm]:
    """Return an arm for each method and each choice of roles whose matrices it updates.

    Adam's moments of the value stage are of no use to the others, and AdamW starts without them,
    too.
    """
    methods = {
        "dion": ("Dion, rank 1/4", "dion", 0.25), "dion_full": ("Dion, full rank", "dion", 1.0),
        "muon": ("Muon", "muon", 0.25),
    }  # fmt: skip
    arms = {"vapo": Arm("AdamW", "", ("model.critic_checkpoint_optimizer=false",))}
    for name, (title, method, fraction) in methods.items():
        for roles in (("actor",), ("critic",), ("actor", "critic")):
            own = [f"optimizer.{role}_method={method}" for role in roles]
            who = " and ".join(roles)
            arms[f"{name}_{'both' if len(roles) > 1 else who}"] = Arm(
                f"{title}: {who}", "",
                (*arms["vapo"].changes, *own, f"optimizer.matrix_rank_fraction={fraction}"),
            )  # fmt: skip
    return arms


OPTIMIZERS = _optimizers()
SHORT = Table(
    "short",
    configs=("tiny.yaml", "ablation_tiny.yaml"),
    arms={
        "vapo": VAPO,
        "ppo": Arm("vanilla PPO", "5", (NO_VALUE_CHECKPOINT,), "ppo"),
        "no_value_pretraining": NO_VALUE_PRETRAINING,
        "no_decoupled_gae": NO_DECOUPLED_GAE,
        "no_length_adaptive": NO_LENGTH_ADAPTIVE,
        "no_clip_higher": NO_CLIP_HIGHER,
        "no_token_level": NO_TOKEN_LEVEL,
        "no_positive_lm": NO_POSITIVE_LM,
        "no_group_sampling": NO_GROUP_SAMPLING,
        "grpo": Arm("GRPO", "47", NO_CRITIC, "grpo"),
        "dapo": Arm("DAPO", "50", NO_CRITIC, "dapo"),
    },
    more_arms={"no_decoupled_gae_95": NO_DECOUPLED_GAE_95, "sao": SAO, "bpco": BPCO},
)
LONG = Table(
    "long",
    configs=("tiny.yaml", "ablation_tiny.yaml", "ablation_long.yaml"),
    arms={
        # No arm has this loss (ablation_long.yaml); the paper removes one technique at a time.
        "vapo": Arm(f"VAPO {NO_POSITIVE_LM.title}", "54"),
        "no_decoupled_gae": _besides(NO_DECOUPLED_GAE),
        "no_decoupled_gae_95": _besides(NO_DECOUPLED_GAE_95),
        "no_length_adaptive": _besides(NO_LENGTH_ADAPTIVE),
        "no_clip_higher": _besides(NO_CLIP_HIGHER),
    },
    has_reward_model=False,
    value_steps=10,
    base_seconds=300.0,
)
TABLES = {
    "short": SHORT,
    "long": LONG,
    "lag": dataclasses.replace(
        SHORT, configs=(*SHORT.configs, "lag_tiny.yaml"), arms=_lags(), more_arms={}
    ),
    "optimizers": dataclasses.replace(SHORT, arms=OPTIMIZERS, more_arms={}),
    "placement": dataclasses.replace(
        LONG,
        configs=(*LONG.configs, "placement_tiny.yaml"),
        arms={
            "vapo": Arm("colocated", ""),
            "carry_over": Arm("colocated, carried over", "", ("rollout.carry_over_groups=8",)),
            **{f"lag_{lag}": _disaggregated(lag) for lag in (0, 1, 4)},
        },
    ),
}
"""By --form."""

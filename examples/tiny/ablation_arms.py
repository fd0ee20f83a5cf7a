"""The arms of the ablation as data: their changed fields, and the paper's results.

All arms of a table share the table's settings and the files of their seed, and differ only in the
fields listed here. Without value pretraining, the critic starts from the reward model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

NO_VALUE_CHECKPOINT = "model.critic_checkpoint=null"
NO_CRITIC = (NO_VALUE_CHECKPOINT, "model.critic_hf_path=null")


@dataclasses.dataclass(frozen=True)
class Arm:
    """One row of the ablation."""

    title: str
    paper: str
    """AIME 2024 avg@32 from VAPO's table 1 (arXiv 2504.05118), Qwen2.5-32B; empty: not in it."""
    changes: tuple[str, ...] = ()
    """Overrides section.field=value of this arm."""
    recipe: str | None = None
    """A file of examples/configs/algorithms, applied before the changes."""
    options: tuple[str, ...] = ()
    """Options of the table's trainer."""
    policy_steps: int | None = None
    """Length of its runs; None: the table's."""
    evaluated_every: int | None = None
    """Policy steps between its evaluations; None: the table's."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Arms to compare, and their shared settings."""

    configs: tuple[str, ...]
    """Files in examples/configs; later ones win."""
    arms: Mapping[str, Arm]
    """By name, in the order in which they are run."""
    more_arms: Mapping[str, Arm] = dataclasses.field(default_factory=dict)
    """Variants that are run only if --arms names them."""
    task: str | None = None
    """Form of the task; None: the table's name."""
    has_reward_model: bool = True
    value_steps: int = 6
    """Steps of the value pretraining that makes a seed's value checkpoint. Few, because only with a
    critic that is still biased does the positive-example loss matter."""
    value_changes: tuple[str, ...] = ()
    """Overrides of the value pretraining."""
    base_sources: tuple[str, ...] = (
        "make_base_model.py",
        "make_tokenizer.py",
        "making.py",
        "skill.py",
        "task.py",
    )
    """The script that makes the base model, and the files that it depends on."""
    base_seconds: float = 120.0
    """Estimate of how long that takes, in the units in which a policy step takes 10."""
    data_sources: tuple[str, ...] = ("task.py",)
    """The same for the problems."""
    trainer: tuple[str, ...] = ()
    """The script that trains, and the files that it depends on; empty: vapo_megatron.train."""
    notes: tuple[str, ...] = ()
    """Paragraphs below the table: results that differ from the paper's, and why."""


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

# Both with the table's learning rate. A critic without a range, or with an optimizer of all its
# weights, is not one to start from: BPCO pretrains its own for as many steps as the seed's has.
TABLES_RATE = "optimizer.critic_learning_rate=5.0e-4"
SAO = Arm(
    "SAO", "",
    ("algorithm.value_pretraining_steps=0", "model.critic_checkpoint_optimizer=false", TABLES_RATE),
    "sao",
)  # fmt: skip
BPCO = Arm("BPCO", "", (*NO_CRITIC, "algorithm.value_pretraining_steps=6", TABLES_RATE), "bpco")


def _besides(arm: Arm) -> Arm:
    """Return the arm with a title that says it is added to the change of the table's first arm."""
    return dataclasses.replace(arm, title=f"and {arm.title}", paper="")


# Measured on 2026-11-25; examples/README.md has the table.
SHORT_NOTES = (
    "Values are pretrained for 6 steps, from a reward model, so the critic is still biased when "
    "the policy starts (explained variance -.03 to -.32 in the first step). There the "
    "positive-example loss shows: without it .152 +- .104 is lost.",
    "Without length-adaptive GAE the accuracy is higher, where the paper's is lower. At alpha=.2 "
    "lambda is 0 for the 3 tokens of a direct answer, which the biased critic alone then judges; "
    "at 0.95 it is judged by its reward. With other base models and alpha=1 (lambda .67 at 3 "
    "tokens, .99 at 100) VAPO was at .942 +- .013 and not behind.",
    "Without token-level loss three runs of five do not learn in 20 steps (.140 .130 .255): a mean "
    "over each response first gives a token of a direct answer 30 times the weight of one in a "
    "chain of thought.",
    "Clip-higher and group sampling make no difference beyond the spread, and GRPO and DAPO end "
    "above VAPO: in 100 tokens none that is needed is rare, and a critic that explains none of the "
    "returns' variance (.09 at most in the first twenty steps) is no better than a group's mean.",
    "One adaptive lambda makes none either. With other base models, whose VAPO ended between .524 "
    "and .938, it was .126 +- .118 and .099 +- .096 lower, in eleven runs of eleven.",
    "Without value pretraining one run of three has longer responses again in the end (89 tokens; "
    "the others 3) and ends at .771.",
)

# The first two measured on 2026-11-26, the others on 2026-11-23 or before.
LONG_NOTES = (
    "With five seeds the accuracy is .253 +- .137 lower without length-adaptive GAE, in each seed: "
    "at lambda 0.95 the reward counts .03 one step, 66 tokens, earlier and .001 two steps earlier; "
    "at the adaptive one, .991, .55 and .30. Only the critic can credit what happened further "
    "back, and value pretraining teaches it little (explained variance 0 in four seeds, .05 in "
    "one). Problems that fail by slips alone go from .34 .32 .35 .34 .26 to .83 .92 .78 .60 .23 in "
    "the first arm, to .66 .71 .40 .40 .11 without it; turned problems from .10 .10 .10 .09 .10 to "
    ".78 .87 .60 .65 .09, and to .34 .69 .32 .07 .13. In seed 4 no arm learns in 12 steps.",
    "With 0.95 for both lambdas it is .373 +- .257 lower, in each seed. That gives up the adaptive "
    "lambda too; against the arm without that alone, whose critic has lambda 1, it is .121 +- .214 "
    "lower, in four of five seeds, most of it in seed 0, where it falls below its base model. One "
    "adaptive lambda makes no difference (+.053 +- .092): at .991 the critic's targets reach "
    "nearly as far as at 1.",
    "Without clip-higher it has been run with earlier base models only, three seeds, and made no "
    "difference (+.016 +- .075), although the turn is rare at first: 0 to 4 tokens of 10,000 "
    "reached the upper bound in a step, 0 to 5 with clip_high=0.2.",
    "No arm has the positive-example loss, which taught an earlier long form by itself at its "
    "usual .1: VAPO reached .461 and .734 in 5 and 10 steps, and .438 and .742 without "
    "length-adaptive GAE.",
    "Two forms came before. With slips alone (every sixth step, no turn, groups of 16, 20 steps) "
    "the first arm ended at .688 +- .018, without length-adaptive GAE .436 +- .073 lower, with "
    "0.95 for both .458 +- .059 lower, without clip-higher .095 +- .019 higher. With turns alone "
    "(8 steps) it ended at .887 +- .061, and no arm differed by more than the spread: -.111 +- "
    ".113, -.060 +- .073, without clip-higher -.046 +- .055, one adaptive lambda -.025 +- .050.",
)

NO_TOKEN_LEVEL = Arm("without token-level loss", "53", ("algorithm.loss_aggregation=sample",))
NO_GROUP_SAMPLING = Arm("without group sampling", "55", ("algorithm.group_size=1",))


def _curve(arm: Arm, policy_steps: int) -> Arm:
    """Return the arm with a length of its own, evaluated often enough for a curve."""
    return dataclasses.replace(arm, policy_steps=policy_steps, evaluated_every=5)


LM = "algorithm.positive_lm_coef=0.1"
ORACLE = ("--oracle",)
KEYS_ARMS = {
    # Long enough for 4,000 responses, which are compared.
    "vapo": _curve(VAPO, 55),
    "dapo": _curve(Arm("DAPO", "50", (NO_VALUE_CHECKPOINT,), "dapo"), 40),
    "grpo": _curve(Arm("GRPO", "47", (NO_VALUE_CHECKPOINT,), "grpo"), 65),
    "oracle": Arm("VAPO with exact values", "", options=ORACLE),
    "dapo_lm": Arm("DAPO with the LM loss", "", (NO_VALUE_CHECKPOINT, LM), "dapo"),
    "grpo_lm": Arm("GRPO with the LM loss", "", (NO_VALUE_CHECKPOINT, LM), "grpo"),
    "dapo_no_dynamic": Arm(
        "DAPO without dynamic sampling", "",
        (NO_VALUE_CHECKPOINT, "algorithm.dynamic_sampling=false"), "dapo",
    ),
    "no_positive_lm": Arm(NO_POSITIVE_LM, "54", ("algorithm.positive_lm_coef=0",)),
    "no_value_pretraining": Arm("without value pretraining", "11", (NO_VALUE_CHECKPOINT,)),
    "no_decoupled_gae": NO_DECOUPLED_GAE,
    "no_decoupled_gae_95": NO_DECOUPLED_GAE_95,
    # Value pretraining always has Monte-Carlo targets; only without it does all that the critic
    # knows come from this lambda.
    "no_values_no_decoupled_gae": Arm(
        "without value pretraining and decoupled GAE", "",
        (NO_VALUE_CHECKPOINT, *NO_DECOUPLED_GAE.changes),
    ),
    "no_group_sampling": NO_GROUP_SAMPLING,
}  # fmt: skip


def _keys(arms: Mapping[str, Arm], *configs: str, **more: object) -> Table:
    """Return the table of a form of locks and keys."""
    return Table(
        configs=("tiny.yaml", "keys_tiny.yaml", *configs),
        arms=arms,
        has_reward_model=False,
        # One step: all responses are there to be read several times.
        value_steps=1,
        value_changes=(
            "algorithm.responses_per_step=512", "algorithm.critic_updates_per_step=6",
        ),
        base_sources=(
            "keys_base.py", "make_base_model.py", "make_tokenizer.py", "making.py", "keys.py"
        ),
        base_seconds=350.0,
        data_sources=("keys.py", "task.py"),
        trainer=("keys_train.py", "keys_credit.py", "keys_values.py", "keys.py"),
        **more,
    )  # fmt: skip


def _apart(title: str, lag: int, *changes: str) -> Arm:
    """Return an arm of which one process trains and one samples."""
    apart = (
        "parallel.world_size=1", "rollout.placement=disaggregated", "rollout.num_processes=1",
        "rollout.max_num_sequences=128", f"rollout.lag={lag}",
    )  # fmt: skip
    return Arm(title, "", (*apart, *changes))


CORRECTIONS = {
    "recomputed": (),
    "TIS": ("algorithm.sampler_correction=tis",),
    "DIS": ("algorithm.policy_loss=dis",),
}
"""Fields of what the learner does about older weights."""


def _lags() -> dict[str, Arm]:
    """Return the arms of every correction at every lag; vapo is recomputed without a lag."""
    arms = {}
    for name, changes in CORRECTIONS.items():
        for lag in (0, 1, 4, 16):
            lags = (f"rollout.lag={lag}",) if lag else ()
            key = f"{name.lower()}_{lag}" if changes or lag else "vapo"
            arms[key] = Arm(f"{name}, lag {lag}", "", (*changes, *lags))
    return arms


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
            "no_token_level": NO_TOKEN_LEVEL,
            "no_positive_lm": Arm(NO_POSITIVE_LM, "54", ("algorithm.positive_lm_coef=0",)),
            "no_group_sampling": NO_GROUP_SAMPLING,
            "grpo": Arm("GRPO", "47", NO_CRITIC, "grpo"),
            "dapo": Arm("DAPO", "50", NO_CRITIC, "dapo"),
        },
        more_arms={"no_decoupled_gae_95": NO_DECOUPLED_GAE_95, "sao": SAO, "bpco": BPCO},
        notes=SHORT_NOTES,
    ),
    "long": Table(
        configs=("tiny.yaml", "ablation_tiny.yaml", "ablation_long.yaml"),
        arms={
            # No arm has this loss (ablation_long.yaml); the paper removes one technique at a time.
            "vapo": Arm(f"VAPO {NO_POSITIVE_LM}", "54"),
            "no_decoupled_gae": _besides(NO_DECOUPLED_GAE),
            "no_decoupled_gae_95": _besides(NO_DECOUPLED_GAE_95),
            "no_length_adaptive": _besides(NO_LENGTH_ADAPTIVE),
            "no_clip_higher": _besides(NO_CLIP_HIGHER),
        },
        has_reward_model=False,
        value_steps=10,
        base_seconds=300.0,
        notes=LONG_NOTES,
    ),
    "lag": Table(
        configs=("tiny.yaml", "ablation_tiny.yaml", "lag_tiny.yaml"), arms=_lags(), task="short"
    ),
    "placement": Table(
        configs=("tiny.yaml", "ablation_tiny.yaml", "ablation_long.yaml", "placement_tiny.yaml"),
        arms={
            "vapo": Arm("colocated", ""),
            "carry_over": Arm("colocated, carried over", "", ("rollout.carry_over_groups=8",)),
            "lag_0": _apart("disaggregated, lag 0", 0),
            "lag_1": _apart("disaggregated, lag 1", 1),
            "lag_4": _apart("disaggregated, lag 4", 4),
        },
        task="long",
        has_reward_model=False,
        value_steps=10,
        base_seconds=300.0,
    ),
    "keys": _keys(
        KEYS_ARMS,
        more_arms={"no_length_adaptive": NO_LENGTH_ADAPTIVE, "no_clip_higher": NO_CLIP_HIGHER},
    ),
    # Lengths differ by four, so a mean over each response first weighs their tokens differently.
    "keys_mixed": _keys(
        {
            "vapo": VAPO,
            "no_token_level": NO_TOKEN_LEVEL,
        },
        more_arms={
            "no_group_sampling": NO_GROUP_SAMPLING,
            "no_length_adaptive": NO_LENGTH_ADAPTIVE,
            "no_decoupled_gae": NO_DECOUPLED_GAE,
            "no_decoupled_gae_95": NO_DECOUPLED_GAE_95,
        },
    ),
    "keys_rare": _keys(
        # With exact values, so that only the bound differs, and no noise of a critic takes the
        # skill of copying away, which the positive-example loss keeps elsewhere.
        {
            "vapo": Arm("VAPO with exact values", "", (NO_VALUE_CHECKPOINT,), options=ORACLE),
            "no_clip_higher": Arm(
                "and without clip-higher",
                "46",
                (NO_VALUE_CHECKPOINT, *NO_CLIP_HIGHER.changes),
                options=ORACLE,
            ),
        },
        "keys_rare.yaml",
    ),
}
"""By form of the task."""

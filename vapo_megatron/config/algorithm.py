"""The section `algorithm`: VAPO and the fields that turn it into related algorithms."""

from __future__ import annotations

from typing import Literal

from vapo_megatron.config.section import Section
from vapo_megatron.config.section import field as _field


class AlgorithmConfig(Section):
    """VAPO; each of its seven techniques is controlled by one field."""

    policy_steps: int = _field(
        313,
        "Steps in which the actor trains, after value pretraining (5,000 updates / 16).",
        ge=0,
    )
    responses_per_step: int = _field(8192, "Responses sampled per step.", ge=1)
    group_size: int = _field(
        16,
        "Group sampling: responses per prompt; prompts = responses_per_step / group_size.",
        "G",
        ge=1,
    )
    dynamic_sampling: bool = _field(
        False,
        "Dynamic sampling (DAPO): drop groups whose responses are all correct or all wrong (with "
        "reward.from_score: whose rewards are all equal) and sample more prompts instead; off "
        "during value pretraining.",
    )
    dynamic_sampling_max_rounds: int = _field(
        10,
        "Maximum sampling rounds per step; after them, dropped groups fill up the batch.",
        ge=1,
    )
    mini_batch_size: int = _field(512, "Responses per optimizer update, summed over ranks.", ge=1)
    advantage_estimator: Literal["gae", "grpo", "dr_grpo", "none"] = _field(
        "gae",
        "How advantages are computed; gae: from a critic's values; grpo: (reward - mean) / std of "
        "the group; dr_grpo: reward - mean; none: there are none, as policy_loss=none needs none. "
        "Only gae trains a critic.",
    )
    stage: Literal["all", "value_pretraining"] = _field(
        "all",
        "all: value pretraining, then policy training; value_pretraining: only the first, to be "
        "used as model.critic_checkpoint of a later run.",
    )
    value_pretraining_steps: int = _field(
        50, "Value pretraining: initial steps in which only the critic trains.", ge=0
    )
    value_pretraining_patience: int | None = _field(
        None,
        "Early stopping of stage=value_pretraining: steps without a new maximum of the explained "
        "variance; null: always value_pretraining_steps.",
        ge=1,
    )
    lambda_critic: float | Literal["same_as_actor"] = _field(
        1.0, "Decoupled GAE: lambda of the critic's returns.", "lambda_critic"
    )
    lambda_actor: float | Literal["adaptive"] = _field(
        "adaptive",
        "Length-adaptive GAE: lambda of the actor's advantages; adaptive: 1 - 1/(alpha*l).",
        "lambda_policy",
    )
    length_adaptive_alpha: float = _field(
        0.05,
        "alpha of the length-adaptive lambda; raise it for short responses to keep alpha*l >= 20.",
        "alpha",
        gt=0,
    )
    gae_length: Literal["response", "action"] = _field(
        "response",
        "l of the adaptive lambda; response: all tokens of the response; action: those that the "
        "losses keep, none of a response that overlong_filtering masks.",
    )
    gae_unit: Literal["token", "turn"] = _field(
        "token",
        "What lambda and gamma are counted in; turn: what the policy says between two observations "
        "of an environment is one step, whose value is that of its first token, and l of the "
        "adaptive lambda is their number.",
    )
    gamma: float = _field(1.0, "Discount per token, or turn: see gae_unit.", "gamma", gt=0, le=1)
    policy_loss: Literal["ppo_clip", "dis", "dppo_tv", "none"] = _field(
        "ppo_clip",
        "ppo_clip: clipped ratio to the policy before the step; dis, dppo_tv: ratio to the "
        "engine, tokens dropped by their ratio (SAO) or by how far their probability moved "
        "(DPPO); none: the positive-example loss alone, so fine-tuning on correct or given "
        "responses.",
    )
    clip_low: float = _field(
        0.2, "Lower clip of the probability ratio, with ppo_clip.", "epsilon_low", ge=0, lt=1
    )
    clip_high: float = _field(
        0.28,
        "Clip-higher: upper clip of the probability ratio, with ppo_clip.",
        "epsilon_high",
        ge=0,
    )
    dis_clip_low: float = _field(
        0.3, "dis drops tokens whose ratio is at most 1 - this.", "epsilon_l", gt=0, le=1
    )
    dis_clip_high: float = _field(
        5.0, "dis drops tokens whose ratio is at least 1 + this.", "epsilon_h", gt=0
    )
    dppo_max_difference: float = _field(
        0.15,
        "dppo_tv drops tokens whose probability moved further than this from the engine's, "
        "towards their advantage.",
        "delta",
        gt=0,
        le=1,
    )
    dppo_ratio_cap: float = _field(20.0, "Largest ratio that weights a token in dppo_tv.", ge=1)
    loss_aggregation: Literal["token", "sample", "constant"] = _field(
        "token",
        "Token-level loss: mean over all tokens; sample: mean per response, then over responses; "
        "constant: sum over tokens / (responses * rollout.max_response_tokens).",
    )
    overlong_filtering: bool = _field(
        False, "Mask truncated responses out of all losses, the critic's included."
    )
    positive_lm_coef: float = _field(
        0.1, "Positive-example LM loss: weight of the NLL of correct responses.", "mu", ge=0
    )
    positive_lm_weight: Literal["one", "advantage"] = _field(
        "one",
        "Weight of a token in that loss; advantage: max(R - V, 0), as in self-imitation learning.",
    )
    advantage_whitening: bool = _field(False, "Normalise advantages over the whole step.")
    value_clip: float | None = _field(
        None,
        "Value clipping: largest distance from the old value in the value loss; null: off.",
        gt=0,
    )
    value_range: list[float] | None = _field(
        None,
        "[low, high], bounded values as in BPCO: V = low + (high - low) (1/2 + atan(head) / pi); "
        "null: V is the value head's output.",
    )
    freeze_critic_attention: bool = _field(
        False, "Freeze the critic's attention: query, key, value and output projections."
    )
    sampler_correction: Literal["none", "tis", "icepop"] = _field(
        "none",
        "Weight tokens in the policy loss by k = probability in the trainer / in vLLM; tis: k is "
        "capped; icepop: tokens with k outside a range are dropped.",
    )
    sampler_tis_cap: float = _field(2.0, "Largest k with sampler_correction=tis.", "C", gt=0)
    sampler_icepop_low: float = _field(
        0.5, "Smallest k that sampler_correction=icepop keeps.", gt=0, le=1
    )
    sampler_icepop_high: float = _field(
        5.0, "Largest k that sampler_correction=icepop keeps.", ge=1
    )
    router_replay: Literal["off", "r2", "r3"] = _field(
        "off",
        "Experts of a token in the policy's update; off: those that its router chooses now; r2: "
        "those of the pass that computed the old log-probabilities; r3: in that pass and the "
        "update, those that vLLM chose.",
    )
    entropy_coef: float = _field(0.0, "Weight of the entropy bonus.", ge=0)
    kl_coef: float = _field(
        0.0,
        "Weight of the KL to the frozen reference policy, model.hf_path (k3 estimator); 0: no "
        "reference policy is loaded.",
        "beta",
        ge=0,
    )
    critic_updates_per_step: int = _field(1, "Critic epochs over each step's mini-batches.", ge=1)

    @property
    def trained_roles(self) -> tuple[Literal["actor", "critic"], ...]:
        """The models that are trained; only GAE needs a critic."""
        if self.stage == "value_pretraining":
            return ("critic",)
        return ("actor", "critic") if self.advantage_estimator == "gae" else ("actor",)

    @property
    def roles(self) -> tuple[Literal["actor", "critic", "reference"], ...]:
        """The models that a run loads; the actor also samples in a value-pretraining stage."""
        if self.stage == "value_pretraining":
            return ("actor", "critic")
        return (*self.trained_roles, "reference") if self.kl_coef > 0 else self.trained_roles

    @property
    def num_prompts(self) -> int:
        """Prompts per step."""
        return self.responses_per_step // self.group_size

    @property
    def num_steps(self) -> int:
        """Steps of the configured stage."""
        policy_steps = self.policy_steps if self.stage == "all" else 0
        return self.value_pretraining_steps + policy_steps

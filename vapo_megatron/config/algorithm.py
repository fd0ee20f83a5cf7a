"""The configuration's section `algorithm`: VAPO, and what makes it one of its neighbours."""

from __future__ import annotations

from typing import Literal

from vapo_megatron.config.section import Section
from vapo_megatron.config.section import field as _field


class AlgorithmConfig(Section):
    """VAPO. Each of the seven techniques is one field."""

    policy_steps: int = _field(
        313,
        "Rollout steps in which the actor trains, after value pretraining (5,000 updates / 16).",
        ge=0,
    )
    responses_per_step: int = _field(8192, "Responses sampled in a step.", ge=1)
    group_size: int = _field(
        16,
        "Group sampling: responses per prompt; prompts = responses_per_step / group_size.",
        "G",
        ge=1,
    )
    dynamic_sampling: bool = _field(
        False,
        "Dynamic sampling (DAPO): drop the groups whose responses are all right or all wrong, and "
        "sample more prompts in their place; not during value pretraining.",
    )
    dynamic_sampling_max_rounds: int = _field(
        10,
        "Rounds of sampling in a step; then dropped groups fill the places that are still empty.",
        ge=1,
    )
    mini_batch_size: int = _field(512, "Responses per optimizer update, over all ranks.", ge=1)
    advantage_estimator: Literal["gae", "grpo", "dr_grpo"] = _field(
        "gae",
        "How advantages are computed; gae: from a critic's values; grpo: (reward - mean) / std of "
        "the group; dr_grpo: reward - mean; these two train no critic.",
    )
    stage: Literal["all", "value_pretraining"] = _field(
        "all",
        "all: value pretraining, then the policy; value_pretraining: that alone, for a later run's "
        "model.critic_checkpoint.",
    )
    value_pretraining_steps: int = _field(
        50, "Value pretraining: first steps, in which the critic alone trains.", ge=0
    )
    value_pretraining_patience: int | None = _field(
        None,
        "Steps without a new maximum of the explained variance after which "
        "stage=value_pretraining is over; null: it has value_pretraining_steps.",
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
        "alpha of the length-adaptive lambda; short responses need more: alpha*l of 20 at least.",
        "alpha",
        gt=0,
    )
    gamma: float = _field(1.0, "Discount per token.", "gamma", gt=0, le=1)
    clip_low: float = _field(0.2, "Lower clip of the probability ratio.", "epsilon_low", ge=0, lt=1)
    clip_high: float = _field(
        0.28, "Clip-higher: upper clip of the probability ratio.", "epsilon_high", ge=0
    )
    loss_aggregation: Literal["token", "sample", "constant"] = _field(
        "token",
        "Token-level loss: average over all tokens; sample: per response and then over responses; "
        "constant: sum over tokens / (responses * rollout.max_response_tokens).",
    )
    overlong_filtering: bool = _field(
        False, "Responses that a length limit cut off carry no loss, of any role."
    )
    positive_lm_coef: float = _field(
        0.1, "Positive-example LM loss: weight of the NLL of correct responses.", "mu", ge=0
    )
    advantage_whitening: bool = _field(False, "Normalise advantages over the whole step.")
    value_clip: float | None = _field(
        None, "Clip of the value around its old value in the value loss; null: none.", gt=0
    )
    value_bound: float | None = _field(
        None,
        "Largest |V|, V = bound * tanh(head / bound); null: V is the value head's output.",
        gt=0,
    )
    freeze_critic_attention: bool = _field(
        False, "Leave the critic's attention at its first weights: query, key, value and output."
    )
    sampler_correction: Literal["none", "tis", "icepop"] = _field(
        "none",
        "Weigh tokens in the policy loss by k, their probability in the trainer over that in the "
        "sampler; tis: at most a cap; icepop: k within a range, tokens outside it are dropped.",
    )
    sampler_tis_cap: float = _field(2.0, "Largest k with sampler_correction=tis.", "C", gt=0)
    sampler_icepop_low: float = _field(
        0.5, "Smallest k that sampler_correction=icepop keeps.", gt=0, le=1
    )
    sampler_icepop_high: float = _field(
        5.0, "Largest k that sampler_correction=icepop keeps.", ge=1
    )
    entropy_coef: float = _field(0.0, "Weight of the entropy bonus.", ge=0)
    kl_coef: float = _field(
        0.0,
        "Weight of the KL to a frozen reference policy, model.hf_path (k3 estimator); 0: none is "
        "loaded.",
        "beta",
        ge=0,
    )
    critic_updates_per_step: int = _field(
        1, "Passes of the critic over each step's mini-batches.", ge=1
    )

    @property
    def trained_roles(self) -> tuple[Literal["actor", "critic"], ...]:
        """The models that learn: a critic only where advantages come from its values.

        In value pretraining as a stage of its own it learns alone.
        """
        if self.stage == "value_pretraining":
            return ("critic",)
        return ("actor", "critic") if self.advantage_estimator == "gae" else ("actor",)

    @property
    def roles(self) -> tuple[Literal["actor", "critic", "reference"], ...]:
        """The models that a run holds: the policy, what learns, and what its KL is taken to."""
        if self.stage == "value_pretraining":
            return ("actor", "critic")
        return (*self.trained_roles, "reference") if self.kl_coef > 0 else self.trained_roles

    @property
    def num_prompts(self) -> int:
        """Prompts of a step."""
        return self.responses_per_step // self.group_size

    @property
    def num_steps(self) -> int:
        """The stage's steps: value pretraining's and, with "all", the policy's."""
        policy_steps = self.policy_steps if self.stage == "all" else 0
        return self.value_pretraining_steps + policy_steps

"""Rules on where and when responses are sampled, or given; rules.py has the others.

Each returns an error message with field, value, rule and remedy, or None.
"""

from __future__ import annotations

import json
from typing import Any

from vapo_megatron.config.environment import environment_mistakes
from vapo_megatron.config.reward import ENVIRONMENT
from vapo_megatron.config.schema import VapoConfig

_WHERE_GIVEN: tuple[tuple[str, Any, str], ...] = (
    ("algorithm.policy_loss", "none", "a ratio is to a policy that has sampled them"),
    ("algorithm.advantage_estimator", "none", "they have no rewards, so no critic is trained"),
    ("algorithm.value_pretraining_steps", 0, "no critic is trained"),
    ("algorithm.group_size", 1, "a row has one response"),
    ("algorithm.dynamic_sampling", False, "no more can be sampled"),
    ("algorithm.kl_coef", 0, "its estimator is for tokens that the policy has sampled"),
    ("rollout.placement", "colocated", "nothing is sampled"),
    ("rollout.carry_over_groups", 0, "nothing is sampled"),
    ("model.reward_hf_path", None, "nothing is judged"),
)
"""Field, its value with data.response_column, and why."""


def given_rule(c: VapoConfig) -> str | None:
    """What there is not where the data give the responses."""
    if c.samples:
        return None
    field = f"data.response_column={c.data.response_column}"
    for name, value, why in _WHERE_GIVEN:
        section, own = name.split(".")
        found = getattr(getattr(c, section), own)
        if found != value:
            value, found = (json.dumps(x) if not isinstance(x, str) else x for x in (value, found))
            return (
                f"{name}={found} must be {value} with {field}: the responses are given, and {why}; "
                "set it, or response_column=null"
            )
    if c.environment.is_on:
        return (
            f"{field} must not be combined with an environment, which answers what is sampled; "
            "set environment.use=null and environment.tools=[], or response_column=null"
        )
    return None


def behaviour_rule(c: VapoConfig) -> str | None:
    """Whose log-probabilities are the old ones."""
    correction = c.algorithm.sampler_correction
    if c.rollout.behaviour == "sampler" and correction != "none":
        return (
            "rollout.behaviour=sampler must not be combined with algorithm.sampler_correction="
            f"{correction}, which corrects the ratio to the engine that behaviour=sampler already "
            "uses; set sampler_correction=none, or behaviour=recomputed"
        )
    return None


def replay_rule(c: VapoConfig) -> str | None:
    """Whose routes are replayed."""
    if c.algorithm.router_replay == "off":
        return None
    is_own = c.rollout.behaviour == "recomputed" or c.algorithm.router_replay == "r3"
    for name, value, ok in (
        ("rollout.behaviour", c.rollout.behaviour, is_own),
        ("algorithm.policy_loss", c.algorithm.policy_loss, c.algorithm.policy_loss != "none"),
    ):
        if not ok:
            return (
                f"algorithm.router_replay={c.algorithm.router_replay} replays the pass that "
                f"computes the old log-probabilities, which there is none of with {name}={value}; "
                f"set router_replay=off, or change {name.split('.')[1]}"
            )
    return None


def placement_rule(c: VapoConfig) -> str | None:
    """In which processes vLLM runs."""
    r = c.rollout
    if not r.is_disaggregated:
        for name in ("num_processes", "lag"):
            if value := getattr(r, name):
                return (
                    f"rollout.{name}={value} needs rollout.placement=disaggregated, found "
                    f"colocated; set it, or {name}=0"
                )
        return None
    if r.num_processes == 0:
        return (
            "rollout.placement=disaggregated needs rollout.num_processes of at least 1, found 0; "
            "set how many processes sample, or placement=colocated"
        )
    field, who = "rollout.placement=disaggregated", "rollout workers keep responses"
    if mistake := _late_verdicts(c, field, who, "placement=colocated"):
        return mistake
    if r.lag and r.max_logprob_difference is not None:
        return (
            f"rollout.lag={r.lag} must not be combined with rollout.max_logprob_difference="
            f"{r.max_logprob_difference:g}: with a lag the engine's weights are older, so its "
            "log-probabilities differ by more than rounding; set max_logprob_difference=null"
        )
    return None


def _late_verdicts(c: VapoConfig, field: str, who: str, off: str) -> str | None:
    """Refuse verdicts that more than one replica decides, or that come after the sampling.

    Args:
        c: the configuration.
        field: what needs a response's own verdict at once, with its value.
        who: what does with the verdict, and `off`, the remedy.
    """
    if c.algorithm.dynamic_sampling:
        return (
            f"{field} must not be combined with algorithm.dynamic_sampling=true, whose rounds "
            f"depend on all replicas' verdicts; set dynamic_sampling=false, or {off}"
        )
    if c.model.reward_hf_path is not None:
        return (
            f"{field} must not be combined with model.reward_hf_path={c.model.reward_hf_path}: "
            f"{who} with their verdicts, but the reward model scores later; set "
            f"reward_hf_path=null, or {off}"
        )
    return None


def shared_queue_rule(c: VapoConfig) -> str | None:
    """What engines that take their groups from one list need."""
    r, group_size = c.rollout, c.algorithm.group_size
    if not r.shared_queue:
        return None
    if r.carry_over_groups:
        return (
            "rollout.shared_queue=true must not be combined with rollout.carry_over_groups="
            f"{r.carry_over_groups}, which cuts responses by each engine's own counts; set "
            "shared_queue=false, or carry_over_groups=0"
        )
    if r.max_num_sequences < group_size:
        return (
            f"rollout.shared_queue=true needs rollout.max_num_sequences={r.max_num_sequences} of "
            f"at least algorithm.group_size={group_size}: engines take whole groups; raise it, or "
            "set shared_queue=false"
        )
    return None


def carry_over_rule(c: VapoConfig) -> str | None:
    """What goes together with groups that are in flight over several steps."""
    r, num_prompts = c.rollout, c.algorithm.num_prompts
    if r.carry_over_groups == 0:
        return None
    field = f"rollout.carry_over_groups={r.carry_over_groups}"
    if r.carry_over_groups > num_prompts:
        return (
            f"{field} must not exceed the groups of a step, responses_per_step / group_size = "
            f"{num_prompts}: more could not all be trained on in the next step, as max_lag may "
            "ask; lower it"
        )
    if mistake := _late_verdicts(c, field, "groups wait", "carry_over_groups=0"):
        return mistake
    if r.max_logprob_difference is not None:
        return (
            f"{field} must not be combined with rollout.max_logprob_difference="
            f"{r.max_logprob_difference:g}: older weights sampled a part of the tokens, so the "
            "log-probabilities differ by more than rounding; set max_logprob_difference=null"
        )
    return None


def environment_rule(c: VapoConfig) -> str | None:
    """What episodes need, and what they do not go together with."""
    e, verifier = c.environment, c.reward.verifier
    if mistake := environment_mistakes(e):
        return mistake
    if not e.is_on:
        if c.reward.use_of(verifier) == ENVIRONMENT:
            return (
                f"reward.verifier={verifier} needs environment.use, whose verdicts are meant, "
                "found null; set it, or another verifier"
            )
        return None
    if c.rollout.carry_over_groups:
        return (
            "rollout.carry_over_groups must be 0 with an environment, whose state is not in a "
            f"checkpoint, found {c.rollout.carry_over_groups}; set it to 0"
        )
    if e.use is not None and "verifier" not in c.reward.model_fields_set:
        return (
            f"environment.use={e.use} needs a verifier to be chosen: reward.verifier=environment "
            "for the environment's own verdicts and rewards, or one that judges the last action "
            "of an episode without a verdict; set it"
        )
    return None

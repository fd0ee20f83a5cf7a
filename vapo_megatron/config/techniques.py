"""VAPO's seven techniques, and the name of the algorithm that a configuration describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vapo_megatron.config.algorithm import AlgorithmConfig
from vapo_megatron.config.model import ModelConfig

Settings = Mapping[str, Any]
"""Every field of `model` and `algorithm`."""


class Technique(NamedTuple):
    """One of VAPO's seven techniques."""

    name: str
    fields: str
    """The fields of `algorithm` or `model` that enable it."""
    is_on: Callable[[Settings], bool]
    sentence: str
    """Its purpose."""


TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        "Value pretraining",
        "value_pretraining_steps critic_checkpoint",
        lambda a: a["value_pretraining_steps"] > 0 or a["critic_checkpoint"] is not None,
        "The critic first learns the returns of the fixed policy, so that the actor never learns "
        "from an untrained critic.",
    ),
    Technique(
        "Decoupled GAE",
        "lambda_critic lambda_actor",
        lambda a: (
            a["advantage_estimator"] == "gae"
            and a["lambda_critic"] not in ("same_as_actor", a["lambda_actor"])
        ),
        "Critic and actor use different lambdas: with lambda 1 the critic's targets are unbiased "
        "returns, while a smaller one keeps the variance of the actor's advantages low.",
    ),
    Technique(
        "Length-adaptive GAE",
        "lambda_actor length_adaptive_alpha",
        lambda a: a["advantage_estimator"] == "gae" and a["lambda_actor"] == "adaptive",
        "lambda = 1 - 1 / (alpha l): in longer responses the reward propagates further back.",
    ),
    Technique(
        "Clip-higher",
        "clip_low clip_high",
        lambda a: a["policy_loss"] == "ppo_clip" and a["clip_high"] > a["clip_low"],
        "The upper clip is wider than the lower one, so that unlikely tokens can gain probability "
        "and the entropy does not collapse.",
    ),
    Technique(
        "Token-level loss",
        "loss_aggregation",
        lambda a: a["loss_aggregation"] == "token",
        "All tokens of a mini-batch have the same weight, so that long responses count in "
        "proportion to their length.",
    ),
    Technique(
        "Positive-example LM loss",
        "positive_lm_coef",
        lambda a: a["positive_lm_coef"] > 0,
        "Adds mu times the negative log-likelihood of correct responses to the loss.",
    ),
    Technique(
        "Group sampling",
        "group_size",
        lambda a: a["group_size"] > 1,
        "Fewer prompts with more samples each, so that a batch has both correct and wrong answers "
        "to the same prompt.",
    ),
)
"""In the paper's order (arXiv 2504.05118)."""


def settings(config: Mapping[str, Any]) -> Settings:
    """Return the fields of `model` and `algorithm`, missing ones with their defaults.

    Args:
        config: section -> fields, as in config.yaml.
    """
    found = ModelConfig().model_dump() | (config.get("model") or {})
    return found | AlgorithmConfig().model_dump() | (config.get("algorithm") or {})


def algorithm_name(config: Mapping[str, Any]) -> str:
    """Return the algorithm's usual name: VAPO, VAPO without clip-higher, GRPO, ...

    Derived from the fields, so that a YAML overlay and the same overrides get the same name.
    Combinations without a name are described by the techniques they have or lack.

    Args:
        config: as for settings.
    """
    found = settings(config)
    if found["stage"] == "value_pretraining":
        return "Value pretraining"
    if found["policy_loss"] == "none":
        is_given = (config.get("data") or {}).get("response_column") is not None
        return "SFT" if is_given else "Fine-tuning on correct responses"
    if found["policy_loss"] == "ppo_clip":
        return _usual_name(found)
    if found["advantage_estimator"] == "gae" and found["group_size"] == 1:
        if found["policy_loss"] == "dis" and found["freeze_critic_attention"]:
            return "SAO"
        if found["policy_loss"] == "dppo_tv" and found["value_range"] is not None:
            return "BPCO"
    return f"{_usual_name(found)} + {_LOSSES[found['policy_loss']]}"


_LOSSES = {"dis": "DIS", "dppo_tv": "DPPO"}
"""Names of the policy losses that are not PPO's."""


def _usual_name(found: Settings) -> str:
    """Name an algorithm, whatever its policy loss."""
    if found["advantage_estimator"] == "dr_grpo":
        return "Dr.GRPO"
    if found["advantage_estimator"] == "grpo":
        return "DAPO" if found["dynamic_sampling"] else "GRPO"
    on = {technique.name: technique.is_on(found) for technique in TECHNIQUES}
    if found["policy_loss"] != "ppo_clip":
        del on["Clip-higher"]  # The other losses have no clip that it could be missing in.
    has = [name for name, is_on in on.items() if is_on]
    lacks = [name for name, is_on in on.items() if not is_on]
    if found["lambda_actor"] == 1 and has == ["Token-level loss", "Group sampling"]:
        return "Open-Reasoner-Zero"
    if has == ["Value pretraining", "Decoupled GAE"]:
        return "VC-PPO"
    name, word, some = ("VAPO", "without", lacks)
    if len(has) < len(lacks):
        name, word, some = ("PPO", "with", has)
    listed = ", ".join(one[0].lower() + one[1:] for one in some)
    return f"{name} {word} {listed}" if some else name

"""VAPO's seven techniques, which of them a configuration has, and the name of what that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vapo_megatron.config.schema import AlgorithmConfig, ModelConfig

Settings = Mapping[str, Any]
"""Every field of `model` and `algorithm`."""


class Technique(NamedTuple):
    """One of the seven."""

    name: str
    fields: str
    """Those that decide, of `algorithm` or `model`."""
    is_on: Callable[[Settings], bool]
    sentence: str
    """What it is good for."""


TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        "Value pretraining",
        "value_pretraining_steps critic_checkpoint",
        lambda a: a["value_pretraining_steps"] > 0 or a["critic_checkpoint"] is not None,
        "The critic learns the returns of the fixed policy first, so that a critic which knows "
        "nothing never steers the actor.",
    ),
    Technique(
        "Decoupled GAE",
        "lambda_critic lambda_actor",
        lambda a: (
            a["advantage_estimator"] == "gae"
            and a["lambda_critic"] not in ("same_as_actor", a["lambda_actor"])
        ),
        "Critic and actor each have their lambda: at 1 the critic's targets are unbiased returns, "
        "while the actor's advantages keep a low variance.",
    ),
    Technique(
        "Length-adaptive GAE",
        "lambda_actor length_adaptive_alpha",
        lambda a: a["advantage_estimator"] == "gae" and a["lambda_actor"] == "adaptive",
        "lambda = 1 - 1 / (alpha l): in a longer response the reward reaches further back.",
    ),
    Technique(
        "Clip-higher",
        "clip_low clip_high",
        lambda a: a["clip_high"] > a["clip_low"],
        "The upper clip is wider than the lower one, so that improbable tokens can gain "
        "probability and entropy does not collapse.",
    ),
    Technique(
        "Token-level loss",
        "loss_aggregation",
        lambda a: a["loss_aggregation"] == "token",
        "Each token of a mini-batch weighs the same, so that long responses count for their "
        "length.",
    ),
    Technique(
        "Positive-example LM loss",
        "positive_lm_coef",
        lambda a: a["positive_lm_coef"] > 0,
        "Correct responses are imitated too: mu times their negative log-likelihood joins the "
        "loss.",
    ),
    Technique(
        "Group sampling",
        "group_size",
        lambda a: a["group_size"] > 1,
        "Fewer prompts with more samples each, so that right and wrong answers to one prompt meet "
        "in one batch.",
    ),
)
"""In the paper's order (arXiv 2504.05118); the sentences are ours."""


def settings(config: Mapping[str, Any]) -> Settings:
    """Return a configuration's fields of `model` and `algorithm`, with the defaults of others.

    Args:
        config: sections of fields, as in config.yaml.
    """
    found = ModelConfig().model_dump() | (config.get("model") or {})
    return found | AlgorithmConfig().model_dump() | (config.get("algorithm") or {})


def algorithm_name(config: Mapping[str, Any]) -> str:
    """Return what people call the algorithm: VAPO, VAPO without clip-higher, GRPO, ...

    It is told by the fields, so that an overlay and the same overrides have one name. An algorithm
    of no name is told by the techniques that it has, or lacks, of the seven.

    Args:
        config: as settings takes it.
    """
    found = settings(config)
    if found["stage"] == "value_pretraining":
        return "Value pretraining"
    if found["advantage_estimator"] == "dr_grpo":
        return "Dr.GRPO"
    if found["advantage_estimator"] == "grpo":
        return "DAPO" if found["dynamic_sampling"] else "GRPO"
    on = {technique.name: technique.is_on(found) for technique in TECHNIQUES}
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

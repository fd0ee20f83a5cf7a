"""The report's text: techniques with their settings, and the configuration.

Every function returns HTML in which all text that comes from the run is escaped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import yaml

from vapo_megatron.config_schema import AlgorithmConfig, ModelConfig, VapoConfig
from vapo_megatron.report_page import escape

_TECHNIQUES: tuple[tuple[str, str, Callable[[Mapping[str, Any]], bool], str], ...] = (
    (
        "Value pretraining",
        "value_pretraining_steps critic_checkpoint",
        lambda a: a["value_pretraining_steps"] > 0 or a["critic_checkpoint"] is not None,
        "The critic learns the returns of the fixed policy first, so that a critic which knows "
        "nothing never steers the actor.",
    ),
    (
        "Decoupled GAE",
        "lambda_critic lambda_actor",
        lambda a: (
            a["advantage_estimator"] == "gae"
            and a["lambda_critic"] not in ("same_as_actor", a["lambda_actor"])
        ),
        "Critic and actor each have their lambda: at 1 the critic's targets are unbiased returns, "
        "while the actor's advantages keep a low variance.",
    ),
    (
        "Length-adaptive GAE",
        "lambda_actor length_adaptive_alpha",
        lambda a: a["advantage_estimator"] == "gae" and a["lambda_actor"] == "adaptive",
        "lambda = 1 - 1 / (alpha l): in a longer response the reward reaches further back.",
    ),
    (
        "Clip-higher",
        "clip_low clip_high",
        lambda a: a["clip_high"] > a["clip_low"],
        "The upper clip is wider than the lower one, so that improbable tokens can gain "
        "probability and entropy does not collapse.",
    ),
    (
        "Token-level loss",
        "loss_aggregation",
        lambda a: a["loss_aggregation"] == "token",
        "Each token of a mini-batch weighs the same, so that long responses count for their "
        "length.",
    ),
    (
        "Positive-example LM loss",
        "positive_lm_coef",
        lambda a: a["positive_lm_coef"] > 0,
        "Correct responses are imitated too: mu times their negative log-likelihood joins the "
        "loss.",
    ),
    (
        "Group sampling",
        "group_size",
        lambda a: a["group_size"] > 1,
        "Fewer prompts with more samples each, so that right and wrong answers to one prompt meet "
        "in one batch.",
    ),
)
"""Name, fields of `algorithm` or `model`, whether they switch it on, and a sentence (the paper's,
arXiv 2504.05118, in our words)."""


def techniques(config: Mapping[str, Any]) -> str:
    """Return a list of the seven techniques, each with its fields, and whether it is on."""
    settings = ModelConfig().model_dump() | (config.get("model") or {})
    settings |= AlgorithmConfig().model_dump() | (config.get("algorithm") or {})
    items = []
    for number, (name, fields, is_on, sentence) in enumerate(_TECHNIQUES, 1):
        state = "on" if is_on(settings) else "off"
        values = "".join(
            f"<code>{field} = {escape(yaml_value(settings[field]))}</code>"
            for field in fields.split()
        )
        items.append(
            f'<li class="{state}"><div class="head"><b>{number}</b><h3>{name}</h3>'
            f'<span class="state">{state}</span></div><p>{sentence}</p>'
            f'<div class="settings">{values}</div></li>'
        )
    return f'<ol class="techniques">{"".join(items)}</ol>'


def configuration(config: Mapping[str, Any]) -> str:
    """Return every field by section; those that differ from their default stand out."""
    if not config:
        return '<p class="empty">config.yaml not found.</p>'
    defaults = VapoConfig().model_dump()
    top = {name: value for name, value in config.items() if not isinstance(value, dict)}
    sections = {"run": top} if top else {}
    sections |= {name: value for name, value in config.items() if isinstance(value, dict)}
    blocks = []
    for name, fields in sections.items():
        of_section = defaults if name == "run" else defaults.get(name, {})
        rows = "".join(_field(field, value, of_section) for field, value in fields.items())
        blocks.append(f"<section><h3>{escape(name)}</h3><table>{rows}</table></section>")
    return f'<div class="config">{"".join(blocks)}</div>'


def _field(name: str, value: Any, defaults: Mapping[str, Any]) -> str:
    changed = ""
    if name in defaults and defaults[name] != value:
        changed = f' class="changed" title="default: {escape(yaml_value(defaults[name]))}"'
    return f"<tr{changed}><th>{escape(name)}</th><td>{escape(yaml_value(value))}</td></tr>"


def yaml_value(value: Any) -> str:
    """Return a field's value as YAML shows it."""
    if isinstance(value, float):
        return f"{value:g}"
    return (
        yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
    )

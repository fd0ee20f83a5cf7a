"""Builds a verifier by its name: one table of the built-in ones, and what a user brings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from vapo_megatron.config import RewardConfig
from vapo_megatron.config.reward import ENVIRONMENT, REWARD_MODEL
from vapo_megatron.errors import ConfigError
from vapo_megatron.reward.code_verifier import CodeVerifier, longest_seconds
from vapo_megatron.reward.environment_verifier import EnvironmentVerifier
from vapo_megatron.reward.exact_verifier import ExactVerifier
from vapo_megatron.reward.gym import check_installed
from vapo_megatron.reward.gym_verifier import ReasoningGymVerifier
from vapo_megatron.reward.isolated import IsolatedVerifier
from vapo_megatron.reward.judge import Judge, Pairwise
from vapo_megatron.reward.math_verifier import MathVerifier
from vapo_megatron.reward.reward_model import RewardModelVerifier
from vapo_megatron.reward.shaping import full_score
from vapo_megatron.reward.verifier import RunningVerifier

Options = dict[str, Any]


def build(name: str | None, reward: RewardConfig, given: object | None = None) -> RunningVerifier:
    """Build a verifier; its processes start when it is first used.

    Args:
        name: a built-in one, one of reward.verifiers, or a user's module:NAME; None: the given one.
        reward: the options of verifiers, and limits of their processes.
        given: an instance, class or function.

    Raises:
        ConfigError: names an option that a built-in one does not have, or that it needs.
    """
    if name is None:
        full = full_score(reward, reward.verifier)
        return _isolated("given to VapoTrainer", given, {}, reward, full_score=full)
    options = dict(reward.verifiers.get(name, {}))
    use = options.pop("use", name)
    if use not in BUILT_IN:
        return _isolated(name, use, options, reward, full_score=full_score(reward, name))
    _check_options(name, use, options)
    return BUILT_IN[use].build(name, options, reward)


def _check_options(name: str, use: str, options: Options) -> None:
    known = inspect.signature(BUILT_IN[use].options).parameters
    for option in options:
        if option not in known:
            raise ConfigError(
                f"reward.verifiers.{name}.{option} is no option of {use}, which has "
                f"{', '.join(known) or 'none'}; remove it"
            )
    for parameter in known.values():
        if parameter.default is parameter.empty and parameter.name not in options:
            raise ConfigError(f"reward.verifiers.{name}.{parameter.name} is required; set it")


def _isolated(
    name: str,
    verifier: object,
    options: Options,
    reward: RewardConfig,
    *,
    seconds: float | None = None,
    full_score: float | None = None,
) -> IsolatedVerifier:
    """seconds: None: reward.timeout_seconds."""
    return IsolatedVerifier(
        name, verifier, options,
        num_workers=reward.num_workers,
        timeout_seconds=reward.timeout_seconds if seconds is None else seconds,
        memory_bytes=int(reward.memory_gb * 1e9),
        full_score=full_score,
    )  # fmt: skip


def _code(_: str, options: Options, reward: RewardConfig) -> RunningVerifier:
    seconds = longest_seconds(options)
    return _isolated("code", _path(CodeVerifier), options, reward, seconds=seconds)


def _reasoning_gym(name: str, options: Options, reward: RewardConfig) -> RunningVerifier:
    check_installed(f"the verifier {name}")
    return _isolated("reasoning_gym", _path(ReasoningGymVerifier), options, reward)


def _path(kind: type) -> str:
    """Return what a worker imports the class by."""
    return f"{kind.__module__}:{kind.__name__}"


class BuiltIn(NamedTuple):
    """A built-in verifier."""

    build: Callable[[str, Options, RewardConfig], RunningVerifier]
    """Called with the name in the data, its options and the section reward."""
    options: type = object
    """Its constructor's parameters are the options; object: there are none."""


BUILT_IN = {
    "math": BuiltIn(lambda _, __, reward: MathVerifier(reward.num_workers, reward.timeout_seconds)),
    "exact": BuiltIn(
        lambda _, options, reward: _isolated("exact", _path(ExactVerifier), options, reward),
        ExactVerifier,
    ),
    "code": BuiltIn(_code, CodeVerifier),
    "reasoning_gym": BuiltIn(_reasoning_gym, ReasoningGymVerifier),
    "judge": BuiltIn(lambda _, options, __: Judge(**options), Judge),
    "pairwise": BuiltIn(lambda _, options, __: Pairwise(**options), Pairwise),
    ENVIRONMENT: BuiltIn(lambda *_: EnvironmentVerifier()),
    REWARD_MODEL: BuiltIn(lambda *_: RewardModelVerifier()),
}
"""By the names that config/reward.py allows."""

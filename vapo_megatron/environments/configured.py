"""What the section environment asks for, as a Play, and the tools that prompts tell of."""

from __future__ import annotations

from typing import Any

from vapo_megatron.config import EnvironmentConfig, RewardConfig
from vapo_megatron.environments.named import resolve
from vapo_megatron.environments.play import Play
from vapo_megatron.reward.shaping import full_score

TOOLS = "tools"
_CHARACTERS_PER_TOKEN = 32
"""More than that are cut before they are encoded, which would take long."""


def build_play(environment: EnvironmentConfig, reward: RewardConfig) -> Play:
    """Return what plays an environment's episodes, not started yet.

    Raises:
        ConfigError: there is no such built-in environment, or its package is missing.
    """
    e = environment
    assert e.is_on, "there is an environment"
    name, options = (TOOLS, {"tools": e.tools}) if e.use is None else (e.use, {})
    return Play(
        name, resolve(name), {**options, **e.options}, at_once=e.num_workers,
        timeout_seconds=e.timeout_seconds, memory_bytes=int(e.memory_gb * 1e9),
        max_characters=_CHARACTERS_PER_TOKEN * e.max_observation_tokens,
        full_score=full_score(reward, reward.verifier),
    )  # fmt: skip


def schemas_of(environment: EnvironmentConfig) -> list[dict[str, Any]]:
    """Return the tools that the environment has, for the chat template: JSON schemas.

    Starts a process, which loads the environment, and ends it.

    Raises:
        ConfigError: it does not load.
    """
    if not environment.is_on:
        return []
    play = build_play(environment, RewardConfig())
    try:
        play.start()
        return play.schemas()
    finally:
        play.close()

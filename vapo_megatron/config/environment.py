"""The section `environment`: what answers a response, so that it goes on for several turns."""

from __future__ import annotations

from typing import Any

from vapo_megatron.config.section import Section
from vapo_megatron.config.section import field as _field


class EnvironmentConfig(Section):
    """What answers the policy's actions (docs/environments.md)."""

    use: str | None = _field(
        None,
        "A built-in environment, or your own class or function, package.module:NAME or "
        "path/to/file.py:NAME; null: a response is one turn.",
    )
    options: dict[str, Any] = _field({}, "Keyword arguments of that class or function.")
    tools: list[str] = _field(
        [],
        "Functions that the policy can call, in place of `use`: built-in ones (calculator, "
        "python), package.module:NAME or path/to/file.py:NAME.",
    )
    max_turns: int = _field(
        16, "Actions of an episode; one that would go on is truncated there.", ge=1
    )
    max_action_tokens: int | None = _field(
        None,
        "Longest action; a longer one is cut and ends the episode; null: what is left of "
        "rollout.max_response_tokens, which limits actions and observations together.",
        ge=1,
    )
    max_observation_tokens: int = _field(
        2048, "Longest text of an observation; a longer one is cut and says so.", ge=1
    )
    timeout_seconds: float = _field(
        60.0, "Time limit of a call; an episode that exceeds it has failed.", gt=0
    )
    memory_gb: float = _field(
        4.0, "Memory of an episode's process beyond what loading it took, in 1e9 bytes.", gt=0
    )
    num_workers: int = _field(32, "Calls under way at a time, per inference engine.", ge=1)

    @property
    def is_on(self) -> bool:
        """Whether anything answers."""
        return self.use is not None or bool(self.tools)


def environment_mistakes(environment: EnvironmentConfig) -> str | None:
    """Say what is wrong with the section by itself: field, value, rule and remedy."""
    e = environment
    if e.use is not None and e.tools:
        return (
            f"environment.use={e.use} must not be combined with environment.tools={e.tools}, which "
            "are an environment of their own; set use=null or tools=[]"
        )
    if e.options and not e.is_on:
        return (
            f"environment.options={e.options} needs environment.use or environment.tools; set one, "
            "or options={}"
        )
    return None

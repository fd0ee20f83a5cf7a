"""The environment `skyrl_gym`: a skyrl_gym BaseTextEnv, which says messages and gives rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import skyrl_gym
from omegaconf import OmegaConf

from vapo_megatron.environments.step import Step
from vapo_megatron.reward.user_code import load


class SkyRLGym:
    """An environment; see step.py.

    It is made for each row, with all of its columns as its `extras`. Where these have no
    reward_spec, it is the row's answer: {"ground_truth": answer}. Rewards are its own, so there is
    no verdict.

    Args:
        id: of a registered environment; None: there is an entry.
        entry: "package.module:NAME" or "path/to/file.py:NAME" of a class; None: there is an id.
        config: its env_config.
        extras: further extras, the same for each row; a row's columns of the same name win.

    Raises:
        ValueError: there are neither or both of id and entry.
    """

    def __init__(
        self,
        id: str | None = None,
        entry: str | None = None,
        config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        if (id is None) == (entry is None):
            raise ValueError(f"id={id} and entry={entry}: exactly one of them must be given")
        self._id, self._entry = id, entry
        self._config, self._extras = OmegaConf.create(dict(config or {})), dict(extras or {})
        self._environment: Any = None

    def reset(self, problem: Any, seed: int) -> list[dict[str, str]]:
        """Begin -> the messages that it adds to the prompt.

        Raises:
            ValueError: it changes the prompt, which is the data's.
        """
        extras = {"extra_info": {}, "reward_spec": {"ground_truth": problem.answer}}
        extras |= {**self._extras, **problem.metadata}
        given = {"env_config": self._config, "extras": extras}
        if self._entry is not None:
            self._environment = load(self._entry)(**given)
        else:
            self._environment = skyrl_gym.make(self._id, **given)
        prompt = [{"role": "user", "content": problem.prompt}]
        messages, _ = self._environment.init([dict(message) for message in prompt])
        if messages[: len(prompt)] != prompt:
            raise ValueError("its init changes the prompt; put what it makes into the data instead")
        return messages[len(prompt) :]

    def step(self, action: str) -> Step:
        """Act.

        Raises:
            ValueError: it wants another action than was sampled.
        """
        found = self._environment.step(action)
        if found.get("postprocessed_action") not in (None, action):
            raise ValueError("its step returns another action, which the policy has not sampled")
        return Step(found["observations"], found["reward"], found["done"])

    def close(self) -> None:
        """End."""
        if self._environment is not None:
            self._environment.close()

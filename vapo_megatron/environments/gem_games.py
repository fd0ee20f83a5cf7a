"""The environment `gem`: the games and tasks of GEM (the package gem-llm)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vapo_megatron.environments.five_tuple import FiveTuple
from vapo_megatron.reward import gym

# With stand-ins for what few of its tasks need and GEM would otherwise fail to import.
gym.load()

import gem  # noqa: E402
import gem.envs  # noqa: E402


class Gem(FiveTuple):
    """See FiveTuple; an id is one that gem.make takes, such as game:GuessTheNumber-v0-easy."""

    @staticmethod
    def registered(id: str) -> Callable[..., Any]:
        """Return what makes it."""
        return functools.partial(gem.make, id)

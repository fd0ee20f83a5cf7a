"""The environment `gymnasium`: any gymnasium.Env whose actions and observations are text."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium

from vapo_megatron.environments.five_tuple import FiveTuple


class Gymnasium(FiveTuple):
    """See FiveTuple; an id may be "module:NAME-v0", whose module is imported first."""

    @staticmethod
    def registered(id: str) -> Callable[..., Any]:
        """Return what makes it."""
        # Its checker warns of characters beyond those that a space of text names.
        return functools.partial(gymnasium.make, id, disable_env_checker=True)

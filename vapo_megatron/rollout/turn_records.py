"""An episode's turns as texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vapo_megatron.data.rollout import Rollout


def turn_records(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> list[dict[str, Any]]:
    """Return an episode's turns: action, observation and reward; texts with special tokens.

    `end`: response tokens up to the action's last one.
    """
    starts = [0, *(turn.end for turn in rollout.turns)]
    said = dict(rollout.inserted)
    return [
        {
            "action": decode(tuple(rollout.token_ids[start : turn.end])),
            "observation": decode(tuple(said[turn.end])) if turn.end in said else "",
            "reward": turn.reward,
            "end": turn.end,
        }
        for start, turn in zip(starts, rollout.turns)
    ]

"""Group sampling: fewer prompts, several responses to each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def repeat_for_group(prompts: Sequence[Item], group_size: int) -> list[Item]:
    """Repeat each prompt group_size times; the copies are adjacent.

        repeated[i * G + j] = prompts[i],   0 <= j < G

    Source: VAPO (arXiv 2504.05118), group sampling: 512 prompts x 16 samples in place of 8192 x 1.

    Args:
        prompts: P items of any kind.
        group_size: G, responses per prompt, at least 1.

    Returns:
        P * G items; group i occupies [i*G, (i+1)*G).

    Raises:
        ValueError: group_size below 1.
    """
    if group_size < 1:
        raise ValueError(f"group_size={group_size} must be at least 1; 1 samples each prompt once")
    return [prompt for prompt in prompts for _ in range(group_size)]

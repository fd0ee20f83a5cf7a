"""Actions as their tags say: one call or the answer each, and nothing behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vapo_megatron.data.trajectories import Header, Step, Trajectory
from vapo_megatron.environments.tool_calls import first_tagged
from vapo_megatron.errors import DataError


def read_actions(
    header: Header, trajectories: Sequence[Trajectory]
) -> tuple[list[Trajectory], list[str]]:
    """Cut what stands behind an action's first call or answer; malformed actions stay as they are.

    Returns:
        The trajectories, and how many actions were cut and are malformed, for the terminal; as they
        were and nothing, where the header names no tags.

    Raises:
        DataError: something follows an answer.
    """
    tags = [*header.calls, *([] if header.answer is None else [header.answer])]
    if not tags:
        return list(trajectories), []
    found, num_cut, num_malformed = [], 0, 0
    for trajectory in trajectories:
        steps: list[Step] = []
        for i, step in enumerate(trajectory.steps):
            tagged = first_tagged(step.action, tags)
            num_malformed += tagged is None
            end = len(step.action) if tagged is None else tagged.end
            num_cut += bool(step.action[end:].strip())
            is_answer = tagged is not None and tagged.tag == header.answer
            if is_answer and (step.observation is not None or i < len(trajectory.steps) - 1):
                raise DataError(
                    f"{trajectory.where}: steps[{i}].action gives the answer, but an observation "
                    "follows it; remove what follows, or the line"
                )
            steps.append(step._replace(action=step.action[:end]))
        found.append(dataclasses.replace(trajectory, steps=tuple(steps)))
    lines = [f"{num_cut:10,} actions cut behind their first call or answer"] if num_cut else []
    if num_malformed:
        lines.append(f"{num_malformed:10,} actions malformed: neither a call nor an answer")
    return found, lines

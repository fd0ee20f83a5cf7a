"""Keeps trajectories by a filter, splits them into states and writes these, each once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.cli.states.policy import Policy, transcript
from vapo_megatron.data.problems import rendered_prompt
from vapo_megatron.data.prompts import without_second_begin
from vapo_megatron.data.storage import replace_file, to_line
from vapo_megatron.data.trajectories import (
    FILTERS,
    Trajectory,
    is_kept,
    state_key,
    state_row,
    states_of,
)
from vapo_megatron.errors import DataError
from vapo_megatron.rollout.special_tokens import begin_of


class Counts(NamedTuple):
    """What a filter keeps."""

    trajectories: int
    sub_trajectories: int
    """Their steps."""
    states: int
    """Their different states."""


def select_states(
    trajectories: Sequence[Trajectory],
    out: Path,
    chosen: str,
    policy: Policy | None,
    about: Mapping[str, Any],
) -> list[str]:
    """Write the states of the trajectories that a filter keeps, and a summary beside them.

    Args:
        trajectories: labelled, where the filter needs it.
        out: a JSONL file; replaced atomically. Its rows are in the trajectories' order; of equal
            ones the first stands for all, with their count.
        chosen: one of FILTERS.
        policy: leaves out states that are too long; None: all fit.
        about: JSON values for the summary.

    Returns:
        Lines for the terminal.

    Raises:
        DataError: nothing is left, or a state cannot be a prompt.
    """
    kept: dict[str, dict[str, Any]] = {}
    places: dict[str, str] = {}
    counts: Counter[str] = Counter()
    keys: list[list[str]] = []
    for trajectory in trajectories:
        is_chosen = is_kept(trajectory, chosen)
        rows = [state_row(trajectory, state) for state in states_of(trajectory)]
        keys.append([state_key(row) for row in rows])
        for key, row in zip(keys[-1], rows) if is_chosen else ():
            kept.setdefault(key, row)
            places.setdefault(key, f"{trajectory.where}, step {row['step']}")
            counts[key] += 1
    by_filter = {name: _counts(trajectories, keys, name) for name in FILTERS}
    if not kept:
        shown = ", ".join(f"{name} {found.trajectories:,}" for name, found in by_filter.items())
        raise DataError(
            f"nothing is left with --filter {chosen}: of {len(trajectories):,} trajectories the "
            f"filters keep {shown}; give another filter, or more trajectories"
        )
    long = _too_long(kept, places, policy)
    written = [{**row, "count": counts[key]} for key, row in kept.items() if key not in long]
    if not written:
        assert policy is not None, "what is too long is so for a model"
        raise DataError(
            f"nothing is left: all {len(kept):,} states have more than "
            f"rollout.max_prompt_tokens={policy.max_prompt_tokens} tokens; raise it"
        )
    labels = labels_by_step(trajectories)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, "".join(map(to_line, written)))
    summary = {
        **about, "filters": {name: found._asdict() for name, found in by_filter.items()},
        "process_by_step": [{"step": step, "judged": n, "mean": m} for step, n, m in labels],
        "too_long": len(long), "written": len(written),
    }  # fmt: skip
    replace_file(out.with_suffix(".summary.json"), json.dumps(summary, indent=1) + "\n")
    lines = [*_table(by_filter, trajectories), *_label_lines(labels)]
    if policy is not None:
        limit = policy.max_prompt_tokens
        lines.append(f"{len(long):10,} states left out: over {limit:,} prompt tokens")
    return [*lines, f"{len(written):10,} states written, filter {chosen}", str(out)]


def labels_by_step(trajectories: Iterable[Trajectory]) -> list[tuple[int, int, float]]:
    """Return (step from 1, labels, their mean) of each step number that has labels."""
    found: dict[int, list[int]] = {}
    for trajectory in trajectories:
        for number, step in enumerate(trajectory.steps, 1):
            if step.process is not None:
                found.setdefault(number, []).append(step.process)
    return [(n, len(found[n]), sum(found[n]) / len(found[n])) for n in sorted(found)]


def _counts(trajectories: Sequence[Trajectory], keys: Sequence[Sequence[str]], name: str) -> Counts:
    some = [k for trajectory, k in zip(trajectories, keys) if is_kept(trajectory, name)]
    return Counts(len(some), sum(map(len, some)), len({key for k in some for key in k}))


def _too_long(
    kept: Mapping[str, dict[str, Any]], places: Mapping[str, str], policy: Policy | None
) -> set[str]:
    """Return the keys of states that exceed the policy's limit; each must be a prompt that reads.

    Raises:
        DataError: one cannot; names its trajectory and step.
    """
    found = set()
    begin = begin_of(policy.tokenizer) if policy is not None else []
    with ProgressBar("states") as bar:
        for done, (key, row) in enumerate(kept.items(), 1):
            render = transcript if policy is None else policy.render
            text = rendered_prompt(row, "prompt", places[key], render)
            if policy is not None:
                tokens = without_second_begin(policy.tokenizer.encode(text), begin)
                if len(tokens) > policy.max_prompt_tokens:
                    found.add(key)
            bar.show(done, len(kept))
    return found


def _table(by_filter: Mapping[str, Counts], trajectories: Sequence[Trajectory]) -> list[str]:
    lines = [f"{'filter':>10}{'trajectories':>14}{'sub-trajectories':>18}{'states':>10}"]
    for name, found in by_filter.items():
        lines.append(
            f"{name:>10}{found.trajectories:14,}{found.sub_trajectories:18,}{found.states:10,}"
        )
    missing = sum(step.process is None for t in trajectories for step in t.steps)
    if missing:
        lines.append(f"{missing:10,} steps without a label, which process and both do not keep")
    unknown = sum(t.outcome is None and not t.truncated for t in trajectories)
    if unknown:
        lines.append(f"{unknown:10,} trajectories without a verdict, which outcome does not keep")
    return lines


def _label_lines(labels: Sequence[tuple[int, int, float]]) -> list[str]:
    if not labels:
        return []
    lines = [f"{'step':>10}{'labels':>14}{'mean label':>18}"]
    return lines + [f"{step:10}{count:14,}{mean:18.3f}" for step, count, mean in labels]

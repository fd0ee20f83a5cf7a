"""Judges the steps that have no label, and keeps the verdicts in a file beside the trajectories.

    {"judged": 1, "reward": {...}}
    {"key": "...", "process": 1, "note": "..."}

A verdict is found again by what was judged: the state, the action and the row's columns. So equal
steps are judged once, and a file that has grown is judged where it is new.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.config import RewardConfig
from vapo_megatron.data.chat import Render
from vapo_megatron.data.lock import locked
from vapo_megatron.data.problems import Problem, rendered_prompt
from vapo_megatron.data.storage import append, replacing, to_line
from vapo_megatron.data.trajectories import (
    Header,
    State,
    Trajectory,
    digest,
    state_key,
    state_row,
    states_of,
)
from vapo_megatron.errors import ConfigError, DataError
from vapo_megatron.reward.checks import FAILED, check_failures
from vapo_megatron.reward.verifiers import Verifiers
from vapo_megatron.rollout.evaluation.samples_file import verdict_settings

FORMAT = 1
AT_ONCE = 256
"""Steps that are judged and then written."""
_NO_REWARD_MODEL = (
    "is judged by reward_model, which scores the responses of a run alone; set another "
    "reward.verifier"
)


class _Asked(NamedTuple):
    """A step to judge."""

    where: str
    key: str
    problem: Problem
    action: str


def judge_steps(
    trajectories: Sequence[Trajectory],
    header: Header,
    reward: RewardConfig,
    path: Path,
    render: Render,
) -> tuple[list[Trajectory], list[str]]:
    """Label every step that has no label.

    The verifier is given a state as its prompt and the action as the response; no ground truth.

    Args:
        trajectories: of the file.
        header: of the file.
        reward: whose default verifier judges, whatever rows name.
        path: of the trajectories; the verdicts are kept beside them.
        render: makes a text of a state that is a chat.

    Returns:
        The trajectories with labels, None where the verdict failed or timed out; such steps are
        judged again next time. And what to tell of them.

    Raises:
        UserError: the verifier does not load, or cannot judge the steps; VerdictsFailed: too many
            verdicts of AT_ONCE failed. What was judged before is kept.
    """
    if all(step.process is not None for t in trajectories for step in t.steps):
        return list(trajectories), []
    settings = verdict_settings(reward, [])["reward"]
    if header.line.get("judge") not in (None, settings):
        raise DataError(
            f"{path}, line 1: its judge is {json.dumps(header.line['judge']):.200}, and "
            f"{json.dumps(settings):.200} would judge the steps that have no label; set reward to "
            "the first, or remove `process` from the lines and `judge` from the header"
        )
    out = path.with_suffix(".judged.jsonl")
    in_use = f"{out} is being written by another command{{holder}}; wait for it"
    with locked(out.with_name(f".{out.name}.lock"), in_use):
        labels = _kept(out, {"judged": FORMAT, "reward": settings})
        asked = list(_asked(trajectories, labels, render))
        failed = ""
        if asked:
            with out.open("ab") as file:
                failed = _judge(asked, reward, labels, file)
    found = [_labelled(trajectory, labels) for trajectory in trajectories]
    num_missing = sum(step.process is None for t in found for step in t.steps)
    lines = [f"{len(asked):10,} steps judged; the verdicts are in {out}"]
    if num_missing:
        lines.append(
            f"{num_missing:10,} steps without a verdict, which the same command judges again; the "
            f"first: {failed}"
        )
    return found, lines


def _asked(
    trajectories: Sequence[Trajectory], labels: Mapping[str, Any], render: Render
) -> Iterator[_Asked]:
    """Yield the steps to judge, equal ones once."""
    seen = set(labels)
    for trajectory, state in _unlabelled(trajectories):
        row = state_row(trajectory, state)
        key = _key(row, state)
        if key in seen:
            continue
        seen.add(key)
        where = f"{trajectory.where}, step {state.step}"
        columns = {k: v for k, v in trajectory.columns.items() if k in row}
        problem = Problem(rendered_prompt(row, "prompt", where, render), "", columns)
        yield _Asked(where, key, problem, state.action)


def _unlabelled(trajectories: Sequence[Trajectory]) -> Iterator[tuple[Trajectory, State]]:
    for trajectory in trajectories:
        for step, state in zip(trajectory.steps, states_of(trajectory), strict=True):
            if step.process is None:
                yield trajectory, state


def _key(row: Mapping[str, Any], state: State) -> str:
    return digest([state_key(row), state.action])


def _labelled(trajectory: Trajectory, labels: Mapping[str, tuple[int, str]]) -> Trajectory:
    steps = []
    for step, state in zip(trajectory.steps, states_of(trajectory), strict=True):
        found = labels.get(_key(state_row(trajectory, state), state))
        if step.process is None and found is not None:
            step = step._replace(process=found[0], note=found[1])
        steps.append(step)
    return dataclasses.replace(trajectory, steps=tuple(steps))


def _judge(
    asked: Sequence[_Asked],
    reward: RewardConfig,
    labels: dict[str, tuple[int, str]],
    file: BinaryIO,
) -> str:
    """Judge, and add to labels and the file; return the first verdict that failed, or nothing."""
    first = ""
    with Verifiers(reward) as verifiers, ProgressBar("steps judged") as bar:
        chosen = _check(verifiers, asked, reward)
        for start in range(0, len(asked), AT_ONCE):
            some = asked[start : start + AT_ONCE]
            problems = [chosen.get(start + i, one.problem) for i, one in enumerate(some)]
            verdicts = verifiers.score([one.action for one in some], problems)
            statuses, records, failed = Counter[str](), [], ""
            for done, (one, verdict) in enumerate(zip(some, verdicts, strict=True), start + 1):
                bar.show(done, len(asked))
                statuses[verdict.status] += 1
                if verdict.status in FAILED:
                    what = verdict.note or verdict.status.replace("_", " ")
                    failed = failed or f"the verifier {reward.verifier} on {one.where}: {what}"
                    continue
                labels[one.key] = int(verdict.is_correct), verdict.note
                process, note = labels[one.key]
                records.append({"key": one.key, "process": process, "note": note})
            check_failures(statuses, reward, failed)
            append(file, records)
            first = first or failed
    return first


def _check(
    verifiers: Verifiers, asked: Sequence[_Asked], reward: RewardConfig
) -> dict[int, Problem]:
    """Refuse a verifier that cannot judge the steps; return what hybrid chose verifiers for."""
    problems = [one.problem for one in asked]
    verifiers.load()
    verifiers.try_out(problems)
    if verifiers.sees_groups():
        raise ConfigError(
            f"reward.verifier={reward.verifier} sees the responses to a prompt together, but here "
            "each step is judged alone; set a verifier of single responses"
        )
    chosen, bad = verifiers.examine(problems, _NO_REWARD_MODEL)
    for i, reason in bad.items():
        raise DataError(
            f"{asked[i].where} {reason} (reward.verifier={reward.verifier} judges steps, without a "
            "ground truth); set a reward.verifier that judges an action by its state, or correct "
            "the line"
        )
    return {i: problems[i].judged_by(name) for i, name in chosen.items()}


def _kept(out: Path, header: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Return the verdicts of an earlier command, and make the file fit to be appended to.

    A partial last line, left by a kill, is dropped, and so is a header without verdicts.

    Raises:
        DataError: it is another judge's, or no such file.
    """
    lines: list[bytes] = []
    with contextlib.suppress(FileNotFoundError), out.open("rb") as file:
        lines = file.readlines()
    first = to_line(header).encode()
    if len(lines) > 1 and not lines[-1].endswith(b"\n"):
        lines.pop()
    is_new = len(lines) < 2
    if lines and not first.startswith(lines[0]):
        _compare(out, lines[0], {} if is_new else header)
    found: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(lines[1:], 2):
        try:
            record = json.loads(line)
            found[record["key"]] = int(record["process"]), str(record["note"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DataError(
                f"{out}, line {number} holds no verdict on a step; remove the line"
            ) from None
    with replacing(out) as file:
        file.writelines([first] if is_new else lines)
    return found


def _compare(out: Path, line: bytes, header: Mapping[str, Any]) -> None:
    try:
        found = json.loads(line)
        is_such = isinstance(found, dict) and "judged" in found
    except (ValueError, RecursionError):
        is_such = False
    if not is_such:
        raise DataError(f"{out} is no file of verdicts on steps; move it away")
    for name, value in header.items():
        if found.get(name) != value:
            raise DataError(
                f"{out} has verdicts of another judge: its {name} is {found.get(name)!r}, here it "
                f"is {value!r}; set reward to that, or remove the file to judge all steps again"
            )

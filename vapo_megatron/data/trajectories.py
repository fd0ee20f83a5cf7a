"""Trajectories in a file, which of them a filter keeps, and the states that they are split into.

A trajectory is s_1, a_1, o_1, ..., a_K: a prompt, the policy's action, what was observed, and so on
up to the last action. A state is all that the policy saw before an action (SWiRL, arXiv 2504.04736,
section 2). The file has a header, then a trajectory per line; docs/trajectories.md has its fields.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from vapo_megatron.data.chat import Message, encodable, read_messages
from vapo_megatron.data.problems import jsonl_rows
from vapo_megatron.errors import DataError

FORMAT = 1
FILTERS = ("none", "process", "outcome", "both")
_OWN = ("question_id", "sample", "prompt", "steps", "answer", "outcome", "truncated")
"""Fields of a trajectory's line; others are columns of the row that it began with."""
_OF_STATES = ("step", "count")
"""Fields of a state's line that are none of a trajectory's."""
_JUDGES_ANSWERS = "verifier"
"""Column that names who judges the row's whole responses, which is not who judges steps."""


@dataclasses.dataclass(frozen=True)
class Header:
    """What the first line says of all trajectories."""

    weights: str
    """Digest of the model that sampled them; see samples_file.weights_digest."""
    chat: bool
    """Prompts, actions and observations are messages of a chat; False: they follow each other as
    text."""
    ends: tuple[str, ...]
    """Texts of one token each at which an action ends beside the model's own stop token."""
    calls: tuple[str, ...]
    """Tags of calls; none: nobody says how an action is written."""
    answer: str | None
    """The tag of the final answer."""
    line: Mapping[str, Any]
    """All of it."""


class Step(NamedTuple):
    """An action and what followed it."""

    action: str
    observation: str | list[Message] | None
    """None: nothing, after the last action."""
    process: int | None = None
    """Whether a judge finds the action good in its state, 1 or 0; None: there is no verdict."""
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One line of the file."""

    where: str
    """File and line, for messages."""
    question_id: int | str
    sample: int
    prompt: str | list[Message]
    """Messages in a chat, where a text is a user's message."""
    steps: tuple[Step, ...]
    """At least one."""
    answer: Any = None
    """The row's ground truth; None: it has none."""
    outcome: bool | None = None
    """Whether the final answer is right; None: there is no verdict."""
    truncated: bool = False
    """Ended by a limit, without a final answer."""
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The row's others, and the tools that prompts told of."""


class State(NamedTuple):
    """What the policy saw before an action, and the action."""

    prompt: str | list[Message]
    action: str
    step: int
    """From 1."""


def is_kept(trajectory: Trajectory, name: str) -> bool:
    """Return whether one of FILTERS keeps a trajectory, which it does as a whole.

    process: every step has the label 1. outcome: the final answer is right, which it is not where
    the trajectory was truncated. both: both. A verdict that is missing is not a good one.
    """
    is_good = all(step.process == 1 for step in trajectory.steps)
    is_right = trajectory.outcome is True and not trajectory.truncated
    return {
        "none": True, "process": is_good, "outcome": is_right, "both": is_good and is_right,
    }[name]  # fmt: skip


def states_of(trajectory: Trajectory) -> list[State]:
    """Split a trajectory: state i + 1 is state i, its action and its observation."""
    found, prompt = [], trajectory.prompt
    for number, step in enumerate(trajectory.steps, 1):
        found.append(State(prompt, step.action, number))
        prompt = _continued(prompt, step)
    return found


def state_row(trajectory: Trajectory, state: State) -> dict[str, Any]:
    """Return a state as a row of data.train_path, with the trajectory's columns; without a count.

    The column `verifier` stays behind: it judges whole responses.
    """
    columns = {k: v for k, v in trajectory.columns.items() if k != _JUDGES_ANSWERS}
    return {
        "prompt": state.prompt, "question_id": trajectory.question_id,
        "sample": trajectory.sample, "step": state.step, "steps": len(trajectory.steps),
        "answer": trajectory.answer, **columns,
    }  # fmt: skip


def state_key(row: Mapping[str, Any]) -> str:
    """Return what equal states have in common: the prompt, the ground truth and other columns."""
    apart = ("question_id", "sample", "step", "steps")
    return digest({name: value for name, value in row.items() if name not in apart})


def digest(value: Any) -> str:
    """Return a short digest of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _continued(prompt: str | list[Message], step: Step) -> str | list[Message]:
    said = step.observation or ""
    if isinstance(prompt, str):
        assert isinstance(said, str), "checked when it was read"
        return prompt + step.action + said
    *earlier, last = prompt
    if last.get("prefix"):  # The action has continued it.
        action = {"role": "assistant", "content": last["content"] + step.action}
    else:
        earlier, action = list(prompt), {"role": "assistant", "content": step.action}
    answer = [{"role": "user", "content": said}] if isinstance(said, str) else said
    return [*earlier, action, *answer]


def read_trajectories(path: Path) -> tuple[Header, list[Trajectory]]:
    """Read and check a file.

    Raises:
        DataError: names file, line, field, value, rule and remedy.
    """
    lines = _lines(path)
    number, first = next(lines, (1, {}))
    header = _header(first, f"{path}, line {number}")
    found: list[Trajectory] = []
    seen: dict[tuple[Any, int], str] = {}
    for number, row in lines:
        trajectory = _trajectory(row, header, f"{path}, line {number}")
        key = trajectory.question_id, trajectory.sample
        if key in seen:
            raise DataError(
                f"{trajectory.where}: question_id={key[0]!r} sample={key[1]} is that of "
                f"{seen[key]} too; remove one of the lines"
            )
        seen[key] = f"line {number}"
        found.append(trajectory)
    if not found:
        raise DataError(f"{path} has no trajectories behind its header; sample some")
    return header, found


def check_ends(header: Header, trajectories: Sequence[Trajectory]) -> None:
    """Refuse actions of which nothing says where they end, unless an end of turn does.

    A policy that is trained to act in such states does not stop, and learns to write what it will
    be told.

    Raises:
        DataError: names the first such action.
    """
    for trajectory in trajectories:
        for i, step in enumerate(trajectory.steps):
            if step.observation is not None and not step.action.endswith(header.ends):
                raise DataError(
                    f"{trajectory.where}: steps[{i}].action ends with {step.action[-20:]!r}, but "
                    f"an action must end at one of the header's ends, {list(header.ends)}: without "
                    "a token that ends it a policy learns to write the observation too; sample "
                    "with rollout.stop_token_ids of such a token, or in a chat, whose turns end"
                )


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if path.suffix != ".jsonl":
        raise DataError(f"{path} must end in .jsonl; give a file of trajectories")
    try:
        yield from jsonl_rows(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}; give an existing file of trajectories"
        ) from None


def _refuse(where: str, field: str, value: Any, rule: str, remedy: str) -> NoReturn:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    raise DataError(f"{where}: {field}={shown} must be {rule}; {remedy}")


def _header(line: dict[str, Any], where: str) -> Header:
    if "trajectories" not in line:
        raise DataError(
            f'{where} is no header of trajectories ({{"trajectories": {FORMAT}, "weights": ...}}); '
            "give a file that begins with one"
        )

    def need(field: str, is_right: bool, rule: str) -> None:
        if not is_right:
            _refuse(where, field, line.get(field), rule, "correct the header")

    tags, ends = line.get("tags"), line.get("ends") or []
    need("trajectories", line["trajectories"] == FORMAT, f"{FORMAT}, the version of the format")
    need("weights", _is_text(line.get("weights")), "the digest of the model that sampled")
    need("chat", isinstance(line.get("chat"), bool), "true or false: are these chats?")
    need("ends", _are_texts(ends), "a list of texts of one token each")
    for field in ("sampling", "environment", "judge"):
        need(field, isinstance(line.get(field), dict | None), "an object, or null")
    need("tools", isinstance(line.get("tools"), list | None), "a list of JSON schemas, or null")
    has_tags = isinstance(tags, dict) and set(tags) == {"calls", "answer"}
    is_right = tags is None or (
        has_tags and _are_texts(tags["calls"]) and isinstance(tags["answer"], str | None)
    )
    need("tags", is_right, '{"calls": [names], "answer": name or null}, or null')
    tags = tags or {"calls": [], "answer": None}
    return Header(
        line["weights"], line["chat"], tuple(ends), tuple(tags["calls"]), tags["answer"], line
    )


def _trajectory(row: dict[str, Any], header: Header, where: str) -> Trajectory:
    for field in _OF_STATES:
        if field in row:
            raise DataError(
                f"{where}: the column {field} is a state's own; rename it in the data that the "
                "trajectories began with"
            )
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise DataError(f"{where} has a number that is not finite; correct it") from None
    encodable(text, "the line", where)

    def need(field: str, is_right: bool, rule: str) -> None:
        if not is_right:
            _refuse(where, field, row.get(field), rule, "correct or remove the line")

    question: Any = row.get("question_id")
    sample: Any = row.get("sample")
    given: Any = row.get("steps")
    need("question_id", _is_count(question) or _is_text(question), "a number from 0, or a text")
    need("sample", _is_count(sample), "a number from 0")
    outcome, truncated = row.get("outcome"), row.get("truncated", False)
    need("outcome", isinstance(outcome, bool | None), "true, false or null")
    need("truncated", isinstance(truncated, bool), "true or false")
    need("steps", isinstance(given, list) and bool(given), "a list of one step at least")
    steps = [_step(step, i, header, where) for i, step in enumerate(given)]
    _check_observations(steps, truncated, where)
    columns = {name: value for name, value in row.items() if name not in _OWN}
    if header.line.get("tools"):
        columns.setdefault("tools", header.line["tools"])
    prompt = _prompt(row.get("prompt"), header, where)
    return Trajectory(
        where, question, sample, prompt, tuple(steps), row.get("answer"), outcome, truncated,
        columns,
    )  # fmt: skip


def _prompt(prompt: Any, header: Header, where: str) -> str | list[Message]:
    if _is_text(prompt):
        return [{"role": "user", "content": prompt}] if header.chat else prompt
    if not header.chat or not isinstance(prompt, list):
        rule = "a text, or a list of messages" if header.chat else "a text, since chat=false"
        _refuse(where, "prompt", prompt, rule, "correct or remove the line")
    messages = read_messages(prompt, "prompt", where)
    if messages[-1]["role"] == "assistant":
        messages[-1]["prefix"] = True  # Which a state's reader asks for again.
    return messages


def _step(step: Any, index: int, header: Header, where: str) -> Step:
    known = step if isinstance(step, dict) else {}

    def need(field: str, is_right: bool, rule: str) -> None:
        if not is_right:
            name = f"steps[{index}].{field}"
            _refuse(where, name, known.get(field), rule, "correct or remove the line")

    action: Any = known.get("action")
    observation: Any = known.get("observation")
    process, note = known.get("process"), known.get("note") or ""
    need("action", _is_text(action) and bool(action.strip()), "a text that says something")
    need("process", process is None or process in (0, 1), "1, 0 or null")
    need("note", isinstance(note, str), "a text")
    if isinstance(observation, list) and header.chat:
        observation = read_messages(observation, f"steps[{index}].observation", where)
    elif not header.chat:
        need("observation", isinstance(observation, str | None), "a text or null, as chat=false")
    else:
        is_right = observation is None or _is_text(observation)
        need("observation", is_right, "a text that says something, messages, or null")
    return Step(action, observation, None if process is None else int(process), note)


def _check_observations(steps: Sequence[Step], truncated: bool, where: str) -> None:
    """Refuse actions that nothing followed, and an observation after the final answer."""
    for i, step in enumerate(steps):
        is_last = i == len(steps) - 1
        if step.observation is None and not is_last:
            rule = "what the next action followed"
            _refuse(where, f"steps[{i}].observation", None, rule, "correct or remove the line")
        if step.observation is not None and is_last and not truncated:
            _refuse(
                where, f"steps[{i}].observation", step.observation,
                "null, as it follows the final answer", "remove it, or set truncated=true",
            )  # fmt: skip


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

"""Draws distinct problems of reasoning_gym's tasks, in streams that share none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.errors import ConfigError, DataError
from vapo_megatron.reward.user_code import last_line
from vapo_megatron.sandbox.channel import OUT_OF_MEMORY, OVER_TIME, Reply
from vapo_megatron.sandbox.pool import WorkerPool
from vapo_megatron.sandbox.process import HandlerRefused

HANDLER = "vapo_megatron.cli.prepare.gym_worker:make_handler"
LIMIT_SECONDS = 600.0
MEMORY_BYTES = 8 * 10**9
PER_REQUEST = 20
MOST_REQUESTS = 16
"""At a time."""
MOST_REPEATS = 1000
"""Draws without a new problem, or ten for each that was found, after which there are no more."""


class Problem(NamedTuple):
    """A problem that its task's scorer judges well."""

    question: str
    answer: str | None
    """None: the task gives none."""
    row: str
    """gym.write_row's text."""
    is_one_line: bool
    """Whether the answer is correct behind `Answer:`."""


class Drawn:
    """What was drawn of a task: its problems, and counts."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.rows = self.unusable = 0
        self.unusable_example = ""


@contextlib.contextmanager
def open_pool() -> Iterator[WorkerPool]:
    """Open the processes that make problems."""
    pool = WorkerPool(HANDLER, {}, min(4, os.cpu_count() or 1), LIMIT_SECONDS, MEMORY_BYTES)
    try:
        pool.describe()
        yield pool
    except HandlerRefused as error:
        last, place = last_line(str(error))
        raise ConfigError(
            f"--reasoning-gym: the package does not load: {last}{place}; "
            "pip install 'vapo-megatron[reasoning-gym]'"
        ) from None
    finally:
        pool.close()


def check_tasks(pool: WorkerPool, configs: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError for a task that is not there, or refuses its configuration."""
    known = pool.describe()["tasks"]
    for task in configs:
        if task in known:
            continue
        needed = [name for name, some in pool.describe()["missing"].items() if task in some]
        raise ConfigError(
            f"--reasoning-gym={task}: the task needs the package {needed[0]}; install it"
            if needed
            else f"--reasoning-gym={task} is no task of reasoning_gym; --reasoning-gym help lists "
            "them"
        )
    asked = [{"task": t, "config": c, "first": 0, "count": 0} for t, c in configs.items()]
    for task, reply in zip(configs, pool.run(asked)):
        if "error" in reply:
            what = last_line(reply["error"])[0].removeprefix("ValueError: ")
            raise ConfigError(f"--config: {task} refuses its configuration: {what}; correct it")
        _problems(reply, task)


def draw(
    pool: WorkerPool,
    task: str,
    config: Mapping[str, Any],
    stream: str,
    count: int,
    known: set[str],
) -> Drawn:
    """Draw distinct problems.

    Args:
        pool: see open_pool.
        task: its name.
        config: its settings.
        stream: names the sequence of problems that is drawn from.
        count: how many.
        known: keys of problems that are not to be drawn; those drawn are added.

    Raises:
        DataError: the task has fewer.
    """
    drawn, repeats, asked = Drawn(), 0, 0
    base = {"task": task, "config": config, "stream": f"{task}/{stream}", "count": PER_REQUEST}
    others = len(known)
    with ProgressBar(f"problems of {task}") as bar:
        while (missing := count - len(drawn.problems)) > 0:
            number = min(-(-missing // PER_REQUEST), MOST_REQUESTS)
            requests = [{**base, "first": asked + i * PER_REQUEST} for i in range(number)]
            asked += number * PER_REQUEST
            for reply in pool.run(requests):
                for made in _problems(reply, task):
                    if len(drawn.problems) < count:
                        repeats = 0 if _take(made, drawn, known, task) else repeats + 1
            if repeats >= max(MOST_REPEATS, 10 * len(drawn.problems)):
                raise DataError(_too_few(task, drawn, others, count))
            bar.show(len(drawn.problems), count)
    return drawn


def _take(made: Mapping[str, Any], drawn: Drawn, known: set[str], task: str) -> bool:
    """Take a problem, or count why not."""
    question = made["question"]
    drawn.rows += 1
    key = " ".join(question.split()) if question is not None else None
    if key in known:
        return False
    if made["reason"] is not None or key is None:
        drawn.unusable += 1
        where = f"{task}: {question!r:.60}" if question is not None else task
        drawn.unusable_example = drawn.unusable_example or f"{where} {made['reason']}"
        return False
    known.add(key)
    drawn.problems.append(
        Problem(question, made["answer"], made["row"], is_one_line=made["is_one_line"])
    )
    return True


def _too_few(task: str, drawn: Drawn, others: int, count: int) -> str:
    found = len(drawn.problems) + others
    unusable = (
        f"; {drawn.unusable:,} others are unusable, such as {drawn.unusable_example}"
        if drawn.unusable
        else ""
    )
    return (
        f"--reasoning-gym={task}: {found:,} distinct problems were found in "
        f"{drawn.rows + others:,} draws, and {count + others:,} are needed, examples and test rows "
        f"included{unusable}; ask for fewer rows, or widen the task with --config"
    )


def _problems(reply: Reply, task: str) -> Sequence[Mapping[str, Any]]:
    """Return a worker's problems. DataError: it has none."""
    if "problems" in reply:
        problems: Sequence[Mapping[str, Any]] = reply["problems"]
        return problems
    if reply == OVER_TIME:
        reason = f"took more than {LIMIT_SECONDS:g} seconds for {PER_REQUEST} problems"
    elif reply == OUT_OF_MEMORY:
        reason = f"took more than {MEMORY_BYTES / 1e9:g} GB of memory"
    else:
        reason = f"failed: {last_line(reply.get('error', 'its process died'))[0]}"
    raise DataError(
        f"--reasoning-gym={task} {reason}; make it easier with --config, or leave it out"
    )

"""`vapo prepare --reasoning-gym`: rows from the procedural tasks of reasoning_gym."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.cli.prepare.columns import SHAPES, Shape
from vapo_megatron.cli.prepare.gym_problems import Drawn, check_tasks, draw, open_pool
from vapo_megatron.cli.prepare.gym_prompts import Prompts
from vapo_megatron.cli.prepare.prepare import prepare
from vapo_megatron.cli.prepare.summary import Summary
from vapo_megatron.errors import ConfigError
from vapo_megatron.reward.gym import check_installed
from vapo_megatron.reward.gym_verifier import COLUMN
from vapo_megatron.reward.verifier import RunningVerifier

_OWN = ("rows", "seed", "config", "system", "shots", "answer_tags", "test_rows", "test_out")
_OF_FILES = ("shape", "prompt_column", "answer_column", "drop_columns", "skip_unusable",
             "without_answers", "solution_column")  # fmt: skip


class _Tasks(argparse.Action):
    """Takes names with commas; `help` lists them and ends the command."""

    def __call__(self, parser: Any, options: Any, value: Any, option: Any = None) -> None:
        """See argparse.Action."""
        if value == "help":
            print(list_tasks())
            parser.exit()
        setattr(options, self.dest, sorted({name.strip() for name in value.split(",")} - {""}))


def add_task_option(group: argparse._ActionsContainer) -> None:
    """Add the option in place of --data."""
    group.add_argument(
        "--reasoning-gym", action=_Tasks, metavar="TASK[,TASK...]",
        help="make the rows with these tasks of the package reasoning_gym; help: list them",
    )  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what goes with it."""
    group = parser.add_argument_group("with --reasoning-gym")
    group.add_argument(
        "--rows", type=int, metavar="N", help="of all tasks together, in equal shares"
    )
    group.add_argument("--seed", type=int, metavar="S", help="other problems (default: 0)")
    group.add_argument(
        "--config", metavar="JSON",
        help="settings of all tasks, or {TASK: settings}; default: the tasks' own",
    )  # fmt: skip
    group.add_argument("--system", metavar="TEXT", help="system prompt, in text the first lines")
    group.add_argument(
        "--shots", type=int, metavar="K", help="examples before each problem, of its task"
    )
    group.add_argument(
        "--answer-tags", action="store_true", default=None,
        help="ask for <answer>...</answer> in place of Answer: ..., as is done for tasks whose "
        "answers have several lines",
    )  # fmt: skip
    group.add_argument(
        "--test-rows", type=int, metavar="M", help="held-out rows, none of them in --out"
    )
    group.add_argument("--test-out", type=Path, metavar="FILE.parquet", help="file of those")


def refuse_mixed(options: argparse.Namespace) -> None:
    """Raise ConfigError for an option of the source that is not used."""
    is_gym = options.reasoning_gym is not None
    for name in _OF_FILES if is_gym else _OWN:
        if getattr(options, name) not in (None, False, ()):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} goes with --{'data' if is_gym else 'reasoning-gym'}; remove it"
            )


def list_tasks() -> str:
    """Return the names of all tasks, for the terminal."""
    check_installed("--reasoning-gym")
    with open_pool() as pool:
        about = pool.describe()
    lines = [textwrap.fill(", ".join(about["tasks"]), 100)]
    for package, tasks in about["missing"].items():
        lines.append(f"with the package {package}: {', '.join(tasks)}")
    return "\n".join(lines)


def prepare_tasks(
    options: argparse.Namespace, tokenizer: Any, verifier: RunningVerifier
) -> list[tuple[Summary, Path]]:
    """Write the files -> (summary, file) of each.

    Raises:
        ConfigError, DataError: names the option, the task and the remedy.
    """
    check_installed("--reasoning-gym")
    configs = read_configs(options.config, options.reasoning_gym)
    counts = {"rows": options.rows or 0, "test": options.test_rows or 0}
    shots, seed = options.shots or 0, options.seed or 0
    _check_numbers(options, counts, shots)
    ask = Prompts(options.template, tokenizer, options.system or "", tags=bool(options.answer_tags))
    drawn: dict[str, dict[str, Drawn]] = {}
    with open_pool() as pool:
        check_tasks(pool, configs)
        for place, task in enumerate(configs):
            known: set[str] = set()
            # The test rows do not depend on how many others there are.
            parts = {"examples": shots} | {
                part: _share(counts[part], place, len(configs)) for part in ("test", "rows")
            }
            drawn[task] = {
                part: draw(pool, task, configs[task], f"{seed}/{part}", count, known)
                for part, count in parts.items()
            }
    files = [("test", options.test_out), ("rows", options.out)]
    return [
        (
            prepare(
                [], out, made=functools.partial(_made, drawn, part, ask), tokenizer=tokenizer,
                verifier=verifier, template="none", overwrite=options.overwrite,
                max_prompt_tokens=options.max_prompt_tokens,
            ),
            out,
        )
        for part, out in files
        if counts[part]
    ]  # fmt: skip


def read_configs(text: str | None, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return task -> settings, in the order of names. Raises ConfigError."""
    if not tasks:
        raise ConfigError("--reasoning-gym must name a task; --reasoning-gym help lists them")
    try:
        given = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"--config={text!r:.80} is not JSON ({error}); correct it") from None
    if not isinstance(given, dict):
        raise ConfigError(f"--config={text!r:.80} must be an object of settings; correct it")
    named = [name for name, value in given.items() if isinstance(value, dict)]
    if named and (wrong := [name for name in given if name not in named or name not in tasks]):
        raise ConfigError(
            f"--config has {wrong[0]} beside tasks' settings, and --reasoning-gym names "
            f"{', '.join(tasks)}; give settings of each task, or the same for all"
        )
    return {task: dict(given.get(task, {})) if named else dict(given) for task in sorted(tasks)}


def _check_numbers(options: argparse.Namespace, counts: Mapping[str, int], shots: int) -> None:
    for name, value, least in (
        ("rows", counts["rows"], 1), ("test-rows", counts["test"], 0), ("shots", shots, 0),
    ):  # fmt: skip
        if value < least:
            raise ConfigError(f"--{name}={value} must be {least} at least; set it")
    if (options.test_out is None) != (not counts["test"]):
        raise ConfigError("--test-rows and --test-out belong together; give both, or neither")
    if options.test_out == options.out:
        raise ConfigError(f"--test-out={options.out} is --out, too; give another file")
    # Before the problems are made, which may take long.
    for name, out in (("out", options.out), ("test-out", options.test_out)):
        if out is not None and out.suffix != ".parquet":
            raise ConfigError(f"--{name}={out} must end in .parquet")
        if out is not None and out.exists() and not options.overwrite:
            raise ConfigError(f"--{name}={out} exists; give another file, or --overwrite")


def _share(total: int, place: int, parts: int) -> int:
    return total // parts + (place < total % parts)


def _made(
    drawn: Mapping[str, Mapping[str, Drawn]], part: str, prompts: Prompts, summary: Summary
) -> Iterator[tuple[Shape, str, dict[str, Any]]]:
    """Yield (shape, where, row), one task after the other in rotation, and count them."""
    summary.template = prompts.template
    by_task = []
    for task, parts in drawn.items():
        here = parts[part]
        by_task.append(_rows(task, here, prompts.of(task, parts)))
        summary.files.append({"file": task, "shape": COLUMN, "rows": here.rows})
        summary.rows += here.rows
        summary.unusable += here.unusable
        summary.unusable_example = summary.unusable_example or here.unusable_example
    for row in filter(None, itertools.chain.from_iterable(itertools.zip_longest(*by_task))):
        yield SHAPES["plain"], *row


def _rows(
    task: str, drawn: Drawn, prompt: Callable[[str], str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, problem in enumerate(drawn.problems):
        yield (
            f"{task}, problem {number}",
            {
                "prompt": prompt(problem.question),
                "answer": problem.answer,
                "verifier": COLUMN,
                COLUMN: problem.row,
            },
        )

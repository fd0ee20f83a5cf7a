"""What the commands of all miniatures share: options, the lock, running, and writing in the end."""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from runner.jobs import ROOT, TINY, Job, require_unchanged
from runner.schedule import locked, run_jobs
from vapo_megatron.cli.command import Parser, run
from vapo_megatron.data.storage import replace_file
from vapo_megatron.run.progress import format_seconds

Sizes = TypeVar("Sizes")
"""How much a miniature does."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an invocation runs and writes."""

    root: Path
    jobs: Sequence[Job]
    write: Callable[[], str | None]
    """Write tables and pages of what is finished; called after an interrupt, too. Returns what to
    say in the end."""
    outcome: Callable[[Job], str] = lambda job: ""
    """A finished job's result, to print."""
    modules: tuple[str, ...] = ()
    """Folders of examples/tiny whose modules the jobs import."""


def at_least(least: int) -> Callable[[str], int]:
    """Return a type of options: whole numbers from `least` on."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
        return int(text)

    return number


def options(name: str, description: str | None, out: str, epilog: str | None = None) -> Parser:
    """Return a parser with the options of all miniatures; out: what --help says of --out."""
    parser = Parser(prog=f"run_{name}_tiny.sh", description=description, epilog=epilog)
    parser.add_argument(
        "--jobs", type=at_least(1), default=2, metavar="N", help="concurrent runs (2)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"output directory ({out})")
    parser.add_argument("--rerun", action="store_true", help="redo what other settings have made")
    return parser


def add_seeds(parser: Parser, count: int = 3) -> None:
    """Add --seeds as a list; count: of the default, from 0 on."""
    default = list(range(count))
    parser.add_argument(
        "--seeds", type=at_least(0), nargs="+", default=default, metavar="N",
        help=f"seeds ({' '.join(map(str, default))})",
    )  # fmt: skip


def add_overrides(parser: Parser) -> None:
    """Add section.field=value, any number of times, for all arms."""
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="for all arms")


def seeds_options(
    name: str,
    description: str | None,
    quick: str = "one seed, few steps, which show that it works",
    count: int = 5,
) -> Parser:
    """Return a parser with --seeds and --quick, for seeds_plan.

    Args:
        name: of the miniature.
        description: what --help says of it.
        quick: what it says of --quick.
        count: default number of seeds.
    """
    parser = options(name, description, f"runs/{name}_tiny, with --quick runs/{name}_quick")
    add_seeds(parser, count)
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def seeds_plan(
    args: argparse.Namespace,
    name: str,
    seed_jobs: Callable[[Path, int], list[Job]],
    table: Callable[[Sequence[Job]], str],
    modules: tuple[str, ...] = (),
) -> Plan:
    """Return a plan that ends with OUT/table.md; --quick has the least seed alone.

    Args:
        args: of seeds_options, parsed.
        name: of the miniature.
        seed_jobs: returns the jobs of a seed; told the directory and the seed.
        table: of what is finished; empty: nothing is.
        modules: see Plan.
    """
    root = (args.out or Path(f"runs/{name}_{'quick' if args.quick else 'tiny'}")).resolve()
    seeds = sorted(set(args.seeds))[: 1 if args.quick else None]
    jobs = [job for seed in seeds for job in seed_jobs(root, seed)]

    def write() -> str | None:
        text = table(jobs)
        if not text:
            return None
        replace_file(root / "table.md", text)
        return f"{text}\n{root / 'table.md'}"

    return Plan(root, jobs, write, modules=modules)


def sized(
    name: str,
    description: str | None,
    arguments: Sequence[str] | None,
    sizes: tuple[Sizes, Sizes],
    seed_jobs: Callable[[Path, int, Sizes], list[Job]],
    table: Callable[[Sequence[Job]], str],
) -> int:
    """Run a miniature whose --quick has other sizes; sizes: whole, quick. See seeds_plan, main."""

    def plan(args: argparse.Namespace) -> Plan:
        chosen = sizes[args.quick]
        return seeds_plan(args, name, lambda root, seed: seed_jobs(root, seed, chosen), table)

    return main(name, seeds_options(name, description), plan, arguments)


def main(
    name: str,
    parser: Parser,
    plan: Callable[[argparse.Namespace], Plan],
    arguments: Sequence[str] | None,
) -> int:
    """Run unfinished jobs, then write; return 1 if a job failed.

    Args:
        name: of the miniature.
        parser: from `options`.
        plan: makes the plan of the parsed arguments.
        arguments: None: the command line's.
    """
    # Closing the terminal sends SIGHUP, which nohup ignores.
    ending = [signal.SIGINT, signal.SIGTERM]
    ending += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return run(
        name, lambda: _work(parser.parse_intermixed_args(arguments), plan),
        interrupted="run the same command to resume", signals=ending,
    )  # fmt: skip


def _work(args: argparse.Namespace, plan: Callable[[argparse.Namespace], Plan]) -> int:
    started, todo = time.monotonic(), plan(args)
    own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if todo.modules:
        folders = [str(TINY / folder) for folder in todo.modules]
        sys.path.extend(folders)  # Of forks.
        path = [str(ROOT), str(TINY), *folders, *filter(None, [os.environ.get("PYTHONPATH")])]
        own["PYTHONPATH"] = os.pathsep.join(path)
    with locked(todo.root) as lock:
        require_unchanged(todo.jobs, rerun=args.rerun)
        try:
            failures = run_jobs(
                todo.jobs, slots=args.jobs, lock=lock, environment={**os.environ, **own}, cwd=ROOT,
                say=lambda line: print(line, flush=True), finished=todo.outcome,
            )  # fmt: skip
        finally:
            told = todo.write()
            took = format_seconds(time.monotonic() - started)
            # A table has its own lines.
            gap = "\n\n" if "\n" in str(told) else "; "
            print(f"{took} in this invocation" + (f"{gap}{told}" if told else ""))
    for name, why in failures.items():
        print(f"{name}: {why}", file=sys.stderr)
    return 1 if failures else 0

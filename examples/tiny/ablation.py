"""The paper's table 1 in miniature: every arm, every seed, one table and one page.

    python examples/tiny/ablation.py [--form long] [--seeds 3] [--arms NAME ...]
                                     [section.field=value ...]

The arms of a seed share base model, problems, reward model, value checkpoint and all settings
except those in ablation_arms.py. If interrupted, the same command resumes. --seeds and --arms
choose what to run; the table has all finished runs with the same settings in the output directory.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ablation_arms import TABLES, Table  # noqa: E402
from ablation_jobs import (  # noqa: E402
    Job,
    arms_by_name,
    is_finished,
    made,
    read_state,
    require_unchanged,
    seed_jobs,
)
from ablation_runner import locked, run_jobs  # noqa: E402
from ablation_table import COLUMNS, Result, markdown, result, rows  # noqa: E402

from vapo_megatron.cli.command import Parser, run  # noqa: E402
from vapo_megatron.data.storage import replace_file  # noqa: E402
from vapo_megatron.errors import UserError  # noqa: E402
from vapo_megatron.run.directory import read_rows  # noqa: E402
from vapo_megatron.run.progress import format_seconds  # noqa: E402
from vapo_megatron.run.report.comparison import build_comparison, table  # noqa: E402
from vapo_megatron.run.report.html import escape  # noqa: E402


def _describe(form: str, table: Table) -> str:
    """List a table's arms and the fields that they change."""
    lines = [f"arms of --form {form} (changed fields):"]
    arms = {**table.arms, **table.more_arms}
    width = max(map(len, arms)) + 2
    for name, arm in arms.items():
        where = "" if name in table.arms else ", not in the table by default"
        changes = (*([f"{arm.recipe}.yaml"] if arm.recipe else []), *arm.changes)
        lines.append(f"  {name:{width}}{arm.title}{where}: {', '.join(changes) or '-'}")
    return "\n".join(lines)


EPILOG = "\n".join(_describe(form, table) for form, table in TABLES.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished arms, write the table and the page; return 1 if an arm failed."""
    parser = Parser(prog="run_ablation_tiny.sh", description=__doc__, epilog=EPILOG)
    parser.add_argument(
        "--form",
        choices=TABLES,
        default="short",
        help="form of the task; each has its own table (short)",
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="run seeds 0 .. N-1 (3)")
    parser.add_argument(
        "--arms", nargs="+", default=[], metavar="NAME", help="arms to run (all of the table)"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="concurrent runs (2)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="output directory (runs/ablation, runs/ablation_long)",
    )  # fmt: skip
    parser.add_argument("--rerun", action="store_true", help="redo runs made with other settings")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="for all arms")

    def work() -> int:
        return _ablate(parser.parse_intermixed_args(arguments))

    # Closing the terminal sends SIGHUP, which nohup ignores.
    ending = [signal.SIGINT, signal.SIGTERM]
    ending += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    interrupted = "run the same command to resume"
    return run("ablation", work, interrupted=interrupted, signals=ending)


def _ablate(args: argparse.Namespace) -> int:
    if args.seeds < 1 or args.jobs < 1:
        raise UserError(f"--seeds {args.seeds} and --jobs {args.jobs} must be at least 1")
    started = time.monotonic()
    # argparse gives --arms all arguments that follow it, overrides included.
    arms = arms_by_name(args.form, [name for name in args.arms if "=" not in name])
    overrides = [*args.overrides, *(text for text in args.arms if "=" in text)]
    standard = "runs/ablation" if args.form == "short" else f"runs/ablation_{args.form}"
    root = (args.out or Path(standard)).resolve()
    seeds = range(args.seeds)
    jobs = [j for seed in seeds for j in seed_jobs(root, args.form, seed, arms, overrides)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with locked(root) as lock:
        require_unchanged(jobs, rerun=args.rerun)
        try:
            failures = run_jobs(
                jobs,
                slots=args.jobs,
                lock=lock,
                environment=environment,
                cwd=ROOT,
                say=lambda line: print(line, flush=True),
                finished=_outcome,
            )
        finally:  # Also after an interrupt.
            seconds = _write(root, args.form, overrides)
            now = format_seconds(time.monotonic() - started)
            print(f"{now} in this invocation; {seconds}")
    for name, why in failures.items():
        print(f"{name}: {why}", file=sys.stderr)
    return 1 if failures else 0


def _outcome(job: Job) -> str:
    """A finished job's accuracy, to print."""
    rows = read_rows(job.out / "metrics.jsonl") if job.num_steps else []
    evaluated = [row for row in rows if "evaluation/response_length_mean" in row]
    return f"accuracy {result(rows).final:.3f}" if len(evaluated) > 1 else ""


def _write(root: Path, form: str, overrides: Sequence[str]) -> str:
    """Write table.md and comparison.html of all finished runs; return their total time as text."""
    jobs, others = made(root, form, overrides)
    notes = () if overrides else TABLES[form].notes
    begun = {job.out.name for job in jobs}
    known = {**TABLES[form].arms, **TABLES[form].more_arms}
    arms = {name: arm for name, arm in known.items() if name in begun}
    runs = {
        name: [job for job in jobs if job.out.name == name and is_finished(job)] for name in arms
    }
    results: dict[str, dict[str, Result]] = {
        name: {job.out.parent.name: result(read_rows(job.out / "metrics.jsonl")) for job in found}
        for name, found in runs.items()
    }
    of_arms = rows(arms, results)
    text = markdown(of_arms, notes)
    replace_file(root / "table.md", text)
    print(f"\n{text}\n{root / 'table.md'}")
    page = root / "comparison.html"
    done = [job.out for found in runs.values() for job in found]
    if len(done) > 1:
        lead = table(COLUMNS, [(title, [escape(c) for c in cells]) for title, cells in of_arms])
        lead += "".join(f'<p class="about">{escape(note)}</p>' for note in notes)
        print(build_comparison(done, page, by_arm=True, lead=lead))
    else:
        page.unlink(missing_ok=True)
    if others:
        print(f"not in the table, because made with other settings: {', '.join(others)}")
    took = sum(state["seconds"] for job in jobs if (state := read_state(job)))
    return f"the table's {len(jobs)} jobs took {format_seconds(took)} in total"


if __name__ == "__main__":
    sys.exit(main())

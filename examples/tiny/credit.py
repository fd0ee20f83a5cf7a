"""Where a value model pays: VAPO, DAPO, GRPO and controls on locks and keys.

    python examples/tiny/credit.py [--seeds 5] [--quick] [--forms FORM ...]

Every seed has a base model, problems and a pretrained critic of its own, which its arms share.
Ends with tables of held-out accuracy by step and by sampled responses (value pretraining and
dropped groups count), of how well advantages credit the keys that were chosen, and a page with
curves. The arms are those of ablation.py --form keys. If interrupted, the same command resumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ablation_arms import TABLES, Arm  # noqa: E402
from ablation_jobs import Job, is_finished, require_unchanged, seed_jobs  # noqa: E402
from ablation_runner import locked, run_jobs  # noqa: E402
from credit_page import by_lock, charts, html_table, page, side_by_side  # noqa: E402
from credit_table import Result, by_responses, by_step, of_credit, read_result  # noqa: E402

from vapo_megatron.cli.command import Parser, run  # noqa: E402
from vapo_megatron.data.storage import replace_file  # noqa: E402
from vapo_megatron.errors import UserError  # noqa: E402
from vapo_megatron.run.progress import format_seconds  # noqa: E402

FORMS = {
    "keys": "20 locks",
    "keys_mixed": "5 to 20 locks",
    "keys_rare": "20 locks of five kinds, two with a good key that is rare at first",
}
MAIN = ("vapo", "dapo", "grpo")
"""The arms of --quick and of the charts' first lines."""
SHOWN_STEP = 5
"""Step whose responses are shown."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs, write tables and pages; return 1 if a job failed."""
    parser = Parser(prog="run_credit_tiny.sh", description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds 0 .. N-1 (5)")
    parser.add_argument(
        "--quick", action="store_true", help="20 steps of VAPO, DAPO and GRPO on 20 locks, one seed"
    )
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=["keys"], help="forms of the task (keys)"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="concurrent runs (2)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="output directory (runs/credit, with --quick runs/credit_quick)",
    )  # fmt: skip
    parser.add_argument("--rerun", action="store_true", help="redo what other settings have made")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="for all arms")
    # Closing the terminal sends SIGHUP, which nohup ignores.
    ending = [signal.SIGINT, signal.SIGTERM]
    ending += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return run(
        "credit", lambda: _credit(parser.parse_intermixed_args(arguments)),
        interrupted="run the same command to resume", signals=ending,
    )  # fmt: skip


def _credit(args: argparse.Namespace) -> int:
    if args.jobs < 1 or args.seeds < 1:
        raise UserError(f"--jobs {args.jobs} and --seeds {args.seeds} must be at least 1")
    started = time.monotonic()
    root = (args.out or Path("runs/credit_quick" if args.quick else "runs/credit")).resolve()
    seeds = range(1 if args.quick else args.seeds)
    forms = ["keys"] if args.quick else [form for form in FORMS if form in args.forms]
    arms = {form: arms_of(form, quick=args.quick) for form in forms}
    jobs = all_jobs(root, seeds, arms, args.overrides)
    with locked(root) as lock:
        require_unchanged(jobs, rerun=args.rerun)
        try:
            failures = run_jobs(
                jobs,
                slots=args.jobs,
                lock=lock,
                environment={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                cwd=ROOT,
                say=lambda line: print(line, flush=True),
                finished=lambda job: _outcome(job, jobs),
            )
        finally:  # Also after an interrupt.
            _write(root, seeds, arms, jobs)
    print(f"{format_seconds(time.monotonic() - started)} in this invocation")
    for name, why in failures.items():
        print(f"{name}: {why}", file=sys.stderr)
    return 1 if failures else 0


def arms_of(form: str, *, quick: bool) -> dict[str, Arm]:
    """Return a form's arms; quick: the main ones, no longer than the others."""
    arms = TABLES[form].arms
    if not quick:
        return dict(arms)
    return {name: dataclasses.replace(arms[name], policy_steps=None) for name in MAIN}


def all_jobs(
    root: Path, seeds: Sequence[int], arms: Mapping[str, Mapping[str, Arm]], more: Sequence[str]
) -> list[Job]:
    """Return the jobs of all forms and seeds; first the main arms of each form, by seed."""
    jobs: dict[str, Job] = {}
    for only_main in (True, False):
        for form, of_form in arms.items():
            chosen = {n: a for n, a in of_form.items() if n in MAIN or not only_main}
            for seed in seeds:
                for job in seed_jobs(root / form, form, seed, chosen, more) if chosen else []:
                    named = dataclasses.replace(
                        job,
                        name=f"{form}/{job.name}",
                        needs=tuple(f"{form}/{n}" for n in job.needs),
                    )
                    jobs.setdefault(named.name, named)
    return list(jobs.values())


def _outcome(job: Job, jobs: Sequence[Job]) -> str:
    """A finished run's held-out accuracy, to print."""
    result = _result(job) if job.num_steps and job.out.name != "value" else None
    return f"accuracy {result.by_step[-1][1]:.3f}" if result else ""


def _result(job: Job) -> Result:
    value = job.out.with_name("value")
    has_value = any(need.endswith("/value") for need in job.needs)
    return read_result(job.out, value if has_value else None)


def _write(
    root: Path, seeds: Sequence[int], arms: Mapping[str, Mapping[str, Arm]], jobs: Sequence[Job]
) -> None:
    """Write each form's table and page of what is finished."""
    by_name = {job.name: job for job in jobs}
    for form, of_form in arms.items():
        runs: dict[str, dict[int, Result]] = {}
        for name in of_form:
            for seed in seeds:
                job = by_name[f"{form}/seed_{seed}/{name}"]
                if is_finished(job):
                    runs.setdefault(name, {})[seed] = _result(job)
        if not runs:
            continue
        begun = {name: arm for name, arm in of_form.items() if name in runs}
        tables = {
            "Held-out accuracy by step": by_step(begun, runs),
            "Held-out accuracy by sampled responses": by_responses(begun, runs),
            "Credit": of_credit(begun, runs),
        }
        text = "\n".join(f"## {title}\n\n{table}" for title, table in tables.items())
        replace_file(root / form / "table.md", f"# Locks and keys: {FORMS[form]}\n\n{text}")
        replace_file(root / form / "curves.svg", charts(begun, runs))
        main_arms = {name: begun[name] for name in MAIN if name in begun}
        seed = min(seed for found in runs.values() for seed in found)
        shown = {
            begun[name].title: root / form / f"seed_{seed}" / name
            for name in ("vapo", "grpo") if name in begun
        }  # fmt: skip
        sections = [(title, html_table(table)) for title, table in tables.items()]
        sections.insert(0, ("VAPO, DAPO and GRPO", charts(main_arms, runs)))
        sections += [
            ("All arms", charts(begun, runs)),
            ("Values against the exact ones", by_lock(begun, runs, 1, 10)),
            ("Advantages, token by token", side_by_side(shown, SHOWN_STEP)),
        ]
        title = f"Where a value model pays: {FORMS[form]}"
        replace_file(root / form / "credit.html", page(title, sections))
        print(f"\n{text}\n{root / form / 'table.md'}\n{root / form / 'credit.html'}")


if __name__ == "__main__":
    sys.exit(main())

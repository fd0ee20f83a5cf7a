"""Where a value model pays: VAPO, DAPO, GRPO and controls on locks and keys.

    python examples/tiny/credit.py [--seeds 5] [--quick | --sensitivity] [--forms FORM ...]

Every seed has a base model, problems and a pretrained critic of its own, which its arms share.
Ends with tables of held-out accuracy by step and by sampled responses (value pretraining and
dropped groups count), of how well advantages credit the keys that were chosen, and a page with
curves. The arms are those of ablation.py --form keys. If interrupted, the same command resumes.

--sensitivity adds runs with other learning rates, group sizes, mini-batches and lambdas
(credit_sweeps.py), in a page of their own.
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

import credit_sweeps  # noqa: E402
import keys  # noqa: E402
from ablation_arms import TABLES, Arm  # noqa: E402
from ablation_jobs import Job, is_finished, require_unchanged, seed_jobs  # noqa: E402
from ablation_runner import locked, run_jobs  # noqa: E402
from credit_page import by_lock, charts, html_table, lead, page, side_by_side  # noqa: E402
from credit_table import (  # noqa: E402
    Result,
    by_responses,
    by_step,
    of_credit,
    of_lengths,
    of_rare_keys,
    read_result,
)

from vapo_megatron.cli.command import Parser, run  # noqa: E402
from vapo_megatron.data.storage import replace_file  # noqa: E402
from vapo_megatron.errors import UserError  # noqa: E402
from vapo_megatron.run.progress import format_seconds  # noqa: E402

FORMS = {
    "keys": "20 locks",
    "keys_mixed": "5 to 20 locks",
    "keys_rare": "6 locks of five kinds, two with a good key that is rare at first",
}
MAIN = ("vapo", "dapo", "grpo")
"""The arms of --quick and of the charts' first lines."""
SHOWN_STEP = 5
"""Step whose responses are shown."""

Results = dict[str, dict[int, Result]]
"""Of a form's finished runs, by arm and seed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs, write tables and pages; return 1 if a job failed."""
    parser = Parser(prog="run_credit_tiny.sh", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="seeds 0 .. N-1 (5; with --sensitivity 2)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="20 steps of VAPO, DAPO and GRPO on 20 locks, one seed"
    )
    parser.add_argument(
        "--sensitivity", action="store_true", help="other settings of the main arms, 20 steps each"
    )
    parser.add_argument(
        "--forms",
        nargs="+",
        choices=FORMS,
        default=list(FORMS),
        metavar="FORM",
        help=f"forms of the task, of {', '.join(FORMS)} (all)",
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
    if args.quick and args.sensitivity:
        raise UserError("--quick and --sensitivity: give one of them")
    standard = 2 if args.sensitivity else 5
    count = standard if args.seeds is None else args.seeds
    if args.jobs < 1 or count < 1:
        raise UserError(f"--jobs {args.jobs} and --seeds {count} must be at least 1")
    seeds = range(1 if args.quick else count)
    started = time.monotonic()
    root = (args.out or Path("runs/credit_quick" if args.quick else "runs/credit")).resolve()
    forms = ["keys"] if args.quick else [form for form in FORMS if form in args.forms]
    arms = (
        sensitivity_arms()
        if args.sensitivity
        else {form: arms_of(form, quick=args.quick) for form in forms}
    )
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
            write = _write_sensitivity if args.sensitivity else _write
            write(root, arms, _finished(arms, jobs))
    print(f"{format_seconds(time.monotonic() - started)} in this invocation")
    for name, why in failures.items():
        print(f"{name}: {why}", file=sys.stderr)
    return 1 if failures else 0


def sensitivity_arms() -> dict[str, dict[str, Arm]]:
    """Return the arms of each form that sweeps compare, and what they change of them."""
    swept = credit_sweeps.swept_arms()
    return {
        form: {
            **{name: TABLES[form].arms[name] for name in MAIN if name in TABLES[form].arms},
            **of_form,
        }
        for form, of_form in swept.items()
    }


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


def _finished(arms: Mapping[str, Mapping[str, Arm]], jobs: Sequence[Job]) -> dict[str, Results]:
    """Return the results of the runs that are finished, by form, arm and seed."""
    found: dict[str, Results] = {form: {name: {} for name in arms[form]} for form in arms}
    for job in jobs:
        form, seed, name = job.name.split("/")
        if name in found[form] and is_finished(job):
            found[form][name][int(seed.removeprefix("seed_"))] = _result(job)
    return {form: {n: runs for n, runs in of.items() if runs} for form, of in found.items()}


def _write(root: Path, arms: Mapping[str, Mapping[str, Arm]], found: Mapping[str, Results]) -> None:
    """Write each form's table and page of what is finished."""
    for form, runs in found.items():
        if not runs:
            continue
        begun = {name: arm for name, arm in arms[form].items() if name in runs}
        tables = {
            "Held-out accuracy by step": by_step(begun, runs),
            "Held-out accuracy by sampled responses": by_responses(begun, runs),
            "Credit": of_credit(begun, runs),
        }
        if keys.FORMS[form].min_locks < keys.FORMS[form].max_locks:
            tables["Held-out accuracy by number of locks"] = of_lengths(begun, runs)
        if rare := keys.FORMS[form].rare_kinds:
            tables["Good keys that are rare at first"] = of_rare_keys(begun, runs, rare)
        text = "\n".join(f"## {title}\n\n{table}" for title, table in tables.items())
        replace_file(root / form / "table.md", f"# Locks and keys: {FORMS[form]}\n\n{text}")
        replace_file(root / form / "curves.svg", charts(begun, runs))
        main_arms = {name: begun[name] for name in MAIN if name in begun}
        replace_file(root / form / "lead.svg", lead(main_arms, runs))
        seed = min(seed for of_arm in runs.values() for seed in of_arm)
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


def _write_sensitivity(
    root: Path, arms: Mapping[str, Mapping[str, Arm]], found: Mapping[str, Results]
) -> None:
    """Write the sweeps' table and page of what is finished."""
    tables = {
        "Each value": credit_sweeps.table(found),
        "Best against best": credit_sweeps.best_against_best(found),
    }
    text = "\n".join(f"## {title}\n\n{table}" for title, table in tables.items())
    replace_file(root / "sensitivity.md", f"# Sensitivity to settings\n\n{text}")
    charts_of_all = credit_sweeps.charts(found)
    replace_file(root / "sensitivity.svg", charts_of_all)
    sections = [("Small multiples", charts_of_all)]
    sections += [(title, html_table(table)) for title, table in tables.items()]
    replace_file(root / "sensitivity.html", page("Sensitivity to settings", sections))
    print(f"\n{text}\n{root / 'sensitivity.md'}\n{root / 'sensitivity.html'}")


if __name__ == "__main__":
    sys.exit(main())

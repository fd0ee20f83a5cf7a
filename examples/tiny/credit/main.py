"""Where a value model pays: VAPO, DAPO, GRPO and controls on locks and keys.

    bash examples/run_credit_tiny.sh [--seeds 5] [--quick | --sensitivity] [--forms FORM ...]

Every seed has a base model, problems and a pretrained critic of its own, which its arms share.
Ends with tables of held-out accuracy by step and by sampled responses (value pretraining and
dropped groups count), of how well advantages credit the keys that were chosen, and a page with
curves. The arms are those of run_ablation_tiny.sh --form keys. If interrupted, the same command
resumes.

--sensitivity adds runs with other learning rates, group sizes, mini-batches and lambdas
(credit/sweeps.py), in a page of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner import command
from runner.arms import Arm, seed_jobs
from runner.jobs import Job, results
from runner.tables import Runs, html_table, page

from credit import keys, sweeps
from credit.arms import MAIN, TABLES
from credit.page import by_lock, charts, lead
from credit.results import Result, last, read_result, tables
from vapo_megatron.data.storage import replace_file
from vapo_megatron.errors import UserError

FORMS = {
    "keys": "20 locks",
    "keys_mixed": "5 to 20 locks",
    "keys_rare": "6 locks of five kinds, two with a good key that is rare at first",
}
Arms = Mapping[str, Mapping[str, Arm]]
"""By form and name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs, write tables and pages; return 1 if a job failed."""
    out = "runs/credit, with --quick runs/credit_quick"
    parser = command.options("credit", __doc__, out)
    parser.add_argument(
        "--seeds",
        type=command.at_least(1),
        metavar="N",
        help="seeds 0 .. N-1 (5; with --sensitivity 2)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="20 steps of VAPO, DAPO and GRPO on 20 locks, one seed"
    )
    parser.add_argument(
        "--sensitivity", action="store_true", help="other settings of the main arms, 20 steps each"
    )
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=list(FORMS), metavar="FORM",
        help=f"forms of the task, of {', '.join(FORMS)} (all)",
    )  # fmt: skip
    command.add_overrides(parser)
    return command.main("credit", parser, plan, arguments)


def plan(args: argparse.Namespace) -> command.Plan:
    """Return what the arguments ask for."""
    if args.quick and args.sensitivity:
        raise UserError("--quick and --sensitivity: give one of them")
    seeds = range(1 if args.quick else args.seeds or (2 if args.sensitivity else 5))
    root = (args.out or Path("runs/credit_quick" if args.quick else "runs/credit")).resolve()
    forms = ["keys"] if args.quick else [form for form in FORMS if form in args.forms]
    arms: Arms = {form: arms_of(form, quick=args.quick) for form in forms}
    arms = sweeps.swept_arms() if args.sensitivity else arms
    jobs = all_jobs(root, seeds, arms, args.overrides)

    def write() -> None:
        found = {form: results(jobs, arms[form], _result, f"{form}/") for form in arms}
        if args.sensitivity:
            _write_sensitivity(root, found)
            return
        for form, runs in found.items():
            if runs:
                _write(root / form, form, arms[form], runs)

    return command.Plan(root, jobs, write, _outcome)


def arms_of(form: str, *, quick: bool) -> dict[str, Arm]:
    """Return a form's arms; quick: the main ones, no longer than the others."""
    arms = TABLES[form].arms
    if not quick:
        return dict(arms)
    return {name: dataclasses.replace(arms[name], policy_steps=None) for name in MAIN}


def all_jobs(root: Path, seeds: Sequence[int], arms: Arms, more: Sequence[str]) -> list[Job]:
    """Return the jobs of all forms and seeds; first the main arms of each form, by seed."""
    jobs: dict[str, Job] = {}
    for only_main in (True, False):
        for form, of_form in arms.items():
            chosen = {n: a for n, a in of_form.items() if n in MAIN or not only_main}
            for seed in seeds if chosen else ():
                for job in seed_jobs(root / form, TABLES[form], seed, chosen, more, f"{form}/"):
                    jobs.setdefault(job.name, job)
    return list(jobs.values())


def _outcome(job: Job) -> str:
    """A finished run's held-out accuracy, to print."""
    return f"accuracy {last(_result(job)):.3f}" if job.num_steps and job.out.name != "value" else ""


def _result(job: Job) -> Result:
    has_value = any(need.endswith("/value") for need in job.needs)
    return read_result(job.out, job.out.with_name("value") if has_value else None)


def _write(out: Path, form: str, arms: Mapping[str, Arm], runs: Runs) -> None:
    """Write a form's tables, charts and page of what is finished."""
    started = {name: arm for name, arm in arms.items() if name in runs}
    main_arms = {name: started[name] for name in MAIN if name in started}
    replace_file(out / "curves.svg", charts(started, runs))
    replace_file(out / "lead.svg", lead(main_arms, runs))
    title = f"Where a value model pays: {FORMS[form]}"
    _write_tables(
        out / "table.md", f"Locks and keys: {FORMS[form]}", tables(started, runs, keys.FORMS[form]),
        out / "credit.html", title,
        [("VAPO, DAPO and GRPO", charts(main_arms, runs))],
        [
            ("All arms", charts(started, runs)),
            ("Values against the exact ones", by_lock(started, runs, 1, 10)),
        ],
    )  # fmt: skip


def _write_sensitivity(root: Path, found: Mapping[str, Runs]) -> None:
    """Write the sweeps' table, charts and page of what is finished."""
    of_sweeps = {
        "Each value": sweeps.table(found),
        "Best against best": sweeps.best_against_best(found),
    }
    of_all = sweeps.charts(found)
    replace_file(root / "sensitivity.svg", of_all)
    title = "Sensitivity to settings"
    _write_tables(
        root / "sensitivity.md", title, of_sweeps, root / "sensitivity.html", title,
        [("Small multiples", of_all)], [],
    )  # fmt: skip


def _write_tables(
    file: Path, heading: str, found: Mapping[str, str], html: Path, title: str,
    before: Sequence[tuple[str, str]], after: Sequence[tuple[str, str]],
) -> None:  # fmt: skip
    """Write tables in Markdown and, between other sections, in a page; print them."""
    text = "\n".join(f"## {name}\n\n{table}" for name, table in found.items())
    replace_file(file, f"# {heading}\n\n{text}")
    sections = [(name, html_table(table)) for name, table in found.items()]
    replace_file(html, page(title, [*before, *sections, *after]))
    print(f"\n{text}\n{file}\n{html}")

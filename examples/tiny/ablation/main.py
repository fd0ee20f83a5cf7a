"""The paper's table 1 in miniature: every arm, every seed, one table and one page.

    bash examples/run_ablation_tiny.sh [--form long] [--seeds 3] [--arms NAME ...]
                                       [section.field=value ...]

The arms of a seed share base model, problems, reward model, value checkpoint and all settings
except those in ablation/arms.py. If interrupted, the same command resumes. --seeds and --arms
choose what to run; the table has all finished runs with the same settings in the output directory.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import credit.arms
from runner import command
from runner.arms import Arm, Table, made, seed_jobs
from runner.curves import reached
from runner.jobs import Job, is_finished, read_state
from runner.tables import against, markdown, spread

from ablation import arms as own
from vapo_megatron.config.metrics import accuracy_name
from vapo_megatron.data.storage import replace_file
from vapo_megatron.errors import UserError
from vapo_megatron.run.directory import read_rows
from vapo_megatron.run.progress import format_seconds
from vapo_megatron.run.report.comparison import build_comparison, table
from vapo_megatron.run.report.html import escape

TABLES = {**own.TABLES, **credit.arms.TABLES}
"""By form of the task, those of locks and keys included."""
THRESHOLD = 0.5
"""Held-out accuracy for `steps_to_threshold`."""
COLUMNS = (
    "final accuracy", "each seed", "against vapo", "best accuracy", "at step", "response length",
    "entropy", f"steps to {THRESHOLD}", "responses per second", "paper",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Result:
    """Summary of a finished run."""

    final: float
    """Held-out accuracy."""
    best: float
    best_step: int
    length: float
    """Mean response length on held-out problems after the last step, in tokens."""
    entropy: float
    """Nats per token, of the policy before the last step."""
    responses_per_second: float | None
    """Median over steps, evaluations and checkpoints left out; None: no step was timed."""
    steps_to_threshold: float | None
    """Step at which held-out accuracy reaches THRESHOLD, interpolated linearly between evaluations;
    None: never."""


def result(rows: Sequence[Mapping[str, Any]]) -> Result:
    """Summarise a run's rows; the last one must have an evaluation."""
    evaluated = [(row["step"], row[name]) for row in rows if (name := accuracy_name(row))]
    best_step, best = max(evaluated, key=lambda pair: (pair[1], -pair[0]))
    speeds = [
        row["tokens_per_second"] / row["rollout/response_length_mean"]
        for row in rows if row.get("tokens_per_second")
    ]  # fmt: skip
    return Result(
        final=evaluated[-1][1],
        best=best,
        best_step=best_step,
        length=rows[-1]["evaluation/response_length_mean"],
        entropy=rows[-1]["actor/entropy"],
        responses_per_second=statistics.median(speeds) if speeds else None,
        steps_to_threshold=reached(evaluated, THRESHOLD),
    )


def rows(arms: Mapping[str, Arm], results: Mapping[str, Mapping[str, Result]]) -> list[list[str]]:
    """Return the table's rows: an arm's title and its cells under COLUMNS.

    Args:
        arms: by name, in the order of the rows.
        results: of each arm's finished runs, by seed.
    """
    finals = {n: {seed: r.final for seed, r in found.items()} for n, found in results.items()}
    names = {seed for found in results.values() for seed in found}
    seeds = sorted(names, key=lambda seed: (len(seed), seed))
    found = []
    for name, arm in arms.items():
        done = [results.get(name, {}).get(seed) for seed in seeds]
        below = against(finals.get(name, {}), finals.get("vapo", {}))
        cells = _cells(done, "" if name == "vapo" else below)
        found.append([f"{arm.title} ({name})", *cells, arm.paper])
    return found


def _cells(of_seeds: Sequence[Result | None], below: str) -> list[str]:
    """of_seeds: one entry per seed, in the same order for all arms; None: no finished run."""
    found = [r for r in of_seeds if r]

    def each(separator: str, name: str, form: str) -> str:
        values = [getattr(r, name) if r else "-" for r in of_seeds]
        shown = [v if v == "-" else "never" if v is None else format(v, form) for v in values]
        return separator.join(shown) if found else "-"

    return [
        spread([r.final for r in found], ".3f"),
        each(" ", "final", ".3f"),
        below,
        spread([r.best for r in found], ".3f"),
        each(", ", "best_step", ""),
        spread([r.length for r in found], ".0f"),
        spread([r.entropy for r in found], ".3f"),
        each(", ", "steps_to_threshold", ".1f"),
        spread([r.responses_per_second for r in found if r.responses_per_second], ".1f"),
    ]


def table_text(of_arms: Sequence[Sequence[str]], told: Sequence[str]) -> str:
    """Return the rows as a Markdown table, followed by notes."""
    return markdown(("arm", *COLUMNS), of_arms) + "".join(f"\n{note}\n" for note in told)


def notes(form: str) -> list[str]:
    """Return paragraphs below the table: results that differ from the paper's, and why."""
    file = Path(__file__).with_name(f"notes_{form}.md")
    return [" ".join(p.split()) for p in file.read_text().split("\n\n")] if file.exists() else []


def _describe(form: str, table: Table) -> str:
    """List a table's arms and the fields that they change."""
    lines = [f"arms of --form {form} (changed fields):"]
    width = max(map(len, table.all_arms)) + 2
    for name, arm in table.all_arms.items():
        where = "" if name in table.arms else ", not in the table by default"
        changes = (*([f"{arm.recipe}.yaml"] if arm.recipe else []), *arm.changes)
        lines.append(f"  {name:{width}}{arm.title}{where}: {', '.join(changes) or '-'}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished arms, write the table and the page; return 1 if an arm failed."""
    out = "runs/ablation, runs/ablation_long"
    epilog = "\n".join(_describe(form, table) for form, table in TABLES.items())
    parser = command.options("ablation", __doc__, out, epilog)
    parser.add_argument(
        "--form",
        choices=TABLES,
        default="short",
        help="form of the task; each has its own table (short)",
    )
    parser.add_argument(
        "--seeds", type=command.at_least(1), default=3, metavar="N", help="run seeds 0 .. N-1 (3)"
    )
    parser.add_argument(
        "--arms", nargs="+", default=[], metavar="NAME", help="arms to run (all of the table)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="for all arms")
    return command.main("ablation", parser, plan, arguments)


def plan(args: argparse.Namespace) -> command.Plan:
    """Return what the arguments ask for."""
    # argparse gives --arms all arguments that follow it, overrides included.
    arms = arms_by_name(args.form, [name for name in args.arms if "=" not in name])
    overrides = [*args.overrides, *(text for text in args.arms if "=" in text)]
    standard = "runs/ablation" if args.form == "short" else f"runs/ablation_{args.form}"
    root, table = (args.out or Path(standard)).resolve(), TABLES[args.form]
    jobs = [j for seed in range(args.seeds) for j in seed_jobs(root, table, seed, arms, overrides)]
    return command.Plan(root, jobs, lambda: _write(root, args.form, overrides), _outcome)


def arms_by_name(form: str, names: Sequence[str]) -> dict[str, Arm]:
    """Return the named arms, or all arms of the table if none is named.

    Raises:
        UserError: an unknown name.
    """
    known = TABLES[form].all_arms
    for name in names:
        if name not in known:
            raise UserError(
                f"--arms {name}: no such arm with --form {form}; known: {', '.join(known)}"
            )
    return {name: known[name] for name in names} if names else dict(TABLES[form].arms)


def _outcome(job: Job) -> str:
    """A finished job's accuracy, to print."""
    rows = read_rows(job.out / "metrics.jsonl") if job.num_steps else []
    evaluated = [row for row in rows if "evaluation/response_length_mean" in row]
    return f"accuracy {result(rows).final:.3f}" if len(evaluated) > 1 else ""


def _write(root: Path, form: str, overrides: Sequence[str]) -> str:
    """Write table.md and comparison.html of all finished runs; return their total time as text."""
    jobs, others = made(root, TABLES[form], overrides)
    told = [] if overrides else notes(form)
    begun = {job.out.name for job in jobs}
    arms = {name: arm for name, arm in TABLES[form].all_arms.items() if name in begun}
    runs = {
        name: [job.out for job in jobs if job.out.name == name and is_finished(job)]
        for name in arms
    }
    results = {
        name: {run.parent.name: result(read_rows(run / "metrics.jsonl")) for run in found}
        for name, found in runs.items()
    }
    of_arms = rows(arms, results)
    text = table_text(of_arms, told)
    replace_file(root / "table.md", text)
    print(f"\n{text}\n{root / 'table.md'}")
    page = root / "comparison.html"
    done = [run for found in runs.values() for run in found]
    if len(done) > 1:
        lead = table(COLUMNS, [(title, [escape(c) for c in cells]) for title, *cells in of_arms])
        lead += "".join(f'<p class="about">{escape(note)}</p>' for note in told)
        print(build_comparison(done, page, by_arm=True, lead=lead))
    else:
        page.unlink(missing_ok=True)
    if others:
        print(f"not in the table, because made with other settings: {', '.join(others)}")
    took = sum(state["seconds"] for job in jobs if (state := read_state(job)))
    return f"the table's {len(jobs)} jobs took {format_seconds(took)} in total"

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
from runner.jobs import Job, finished, metrics, read_state
from runner.tables import Cell, accuracies, cells, difference, each, markdown, mean

from ablation import adapters
from ablation import arms as own
from vapo_megatron.data.storage import replace_file
from vapo_megatron.errors import UserError
from vapo_megatron.run.progress import format_seconds
from vapo_megatron.run.report.comparison import build_comparison, table
from vapo_megatron.run.report.html import escape

KEYS = credit.arms.TABLES


def _with_adapters(table: Table, actor_rate: float, critic_rate: float) -> Table:
    arms, more_arms = adapters.arms(actor_rate, critic_rate, factor=3)
    return dataclasses.replace(table, arms=arms, more_arms=more_arms, has_reward_model=False)


TABLES = {
    **own.TABLES, **KEYS,
    "keys_optimizers": dataclasses.replace(KEYS["keys"], arms=own.OPTIMIZERS, more_arms={}),
    "lora": _with_adapters(own.SHORT, 5e-4, 5e-4),
    "keys_lora": _with_adapters(KEYS["keys"], 2.5e-4, 5e-4),
}  # fmt: skip
"""By form of the task, those of locks and keys included."""
THRESHOLD = 0.5
"""Held-out accuracy, to which steps are counted."""


Rows = Sequence[Mapping[str, Any]]
"""Of a finished run's metrics.jsonl; the last one has an evaluation."""


def final(rows: Rows) -> float:
    """Return the last held-out accuracy."""
    return accuracies(rows)[-1][1]


def best(rows: Rows) -> tuple[float, float]:
    """Return the first of the steps with the best held-out accuracy, and that accuracy."""
    return max(accuracies(rows), key=lambda point: (point[1], -point[0]))


def responses_per_second(rows: Rows) -> float | None:
    """Return the median over steps, evaluations and checkpoints left out; None: none was timed."""
    speeds = [
        row["tokens_per_second"] / row["rollout/response_length_mean"]
        for row in rows if row.get("tokens_per_second")
    ]  # fmt: skip
    return statistics.median(speeds) if speeds else None


def update_seconds(rows: Rows, role: str) -> float | None:
    """Return the median over steps of a role's updates; None: it has none."""
    name = f"time/{role}_update_seconds"
    found = [row[name] for row in rows if row.get(name)]
    return statistics.median(found) if found else None


COLUMNS: dict[str, Cell] = {
    "final accuracy": mean(final),
    "each seed": each(final),
    "against vapo": difference(final),
    "best accuracy": mean(lambda rows: best(rows)[1]),
    "at step": each(lambda rows: best(rows)[0], "", ", "),
    "response length": mean(lambda rows: rows[-1]["evaluation/response_length_mean"], ".0f"),
    "entropy": mean(lambda rows: rows[-1]["actor/entropy"]),
    f"steps to {THRESHOLD}": each(lambda rows: reached(accuracies(rows), THRESHOLD), ".1f", ", "),
    "responses per second": mean(responses_per_second, ".1f"),
}
"""Lengths are in tokens, on held-out problems; entropy in nats per token, before the last step."""
UPDATES: dict[str, Cell] = {
    "actor's updates": mean(lambda rows: update_seconds(rows, "actor"), ".2f"),
    "critic's updates": mean(lambda rows: update_seconds(rows, "critic"), ".2f"),
}
"""Seconds a step; of the tables of optimizers."""


VALUES: dict[str, Cell] = {
    "explained variance": mean(lambda rows: explained_variance(rows)),
    "each seed's": each(lambda rows: explained_variance(rows)),
}
"""Of the critic's values, in the last five steps; of the tables of adapters."""


def explained_variance(rows: Rows) -> float | None:
    """Return its mean over the last five steps, before each one's updates."""
    found = [row["critic/explained_variance"] for row in rows if "critic/explained_variance" in row]
    return statistics.fmean(found[-5:]) if found else None


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
    command.add_overrides(parser)
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
    rows = metrics(job) if job.num_steps else []
    evaluated = [row for row in rows if "evaluation/response_length_mean" in row]
    return f"accuracy {final(rows):.3f}" if len(evaluated) > 1 else ""


def _write(root: Path, form: str, overrides: Sequence[str]) -> str:
    """Write table.md and comparison.html of all finished runs; return their total time as text."""
    jobs, others = made(root, TABLES[form], overrides)
    told = [] if overrides else notes(form)
    started = {job.out.name for job in jobs}
    arms = {name: arm for name, arm in TABLES[form].all_arms.items() if name in started}
    done = finished(jobs, arms)
    runs = {name: {seed: metrics(job) for seed, job in of.items()} for name, of in done.items()}
    paper: dict[str, Cell] = {"paper": lambda _, name: arms[name].paper}
    more = {"optimizers": UPDATES, "lora": {**VALUES, **UPDATES}}
    columns = {**COLUMNS, **more.get(form.removeprefix("keys_"), paper)}
    titles = {name: f"{arm.title} ({name})" for name, arm in arms.items()}
    of_arms = cells(titles, columns, runs)
    text = markdown(("arm", *columns), of_arms) + "".join(f"\n{note}\n" for note in told)
    replace_file(root / "table.md", text)
    print(f"\n{text}\n{root / 'table.md'}")
    page = root / "comparison.html"
    outs = [job.out for of in done.values() for job in of.values()]
    if len(outs) > 1:
        lead = table(columns, [(title, list(map(escape, row))) for title, *row in of_arms])
        lead += "".join(f'<p class="about">{escape(note)}</p>' for note in told)
        print(build_comparison(outs, page, by_arm=True, lead=lead))
    else:
        page.unlink(missing_ok=True)
    if others:
        print(f"not in the table, because made with other settings: {', '.join(others)}")
    took = sum(state["seconds"] for job in jobs if (state := read_state(job)))
    return f"the table's {len(jobs)} jobs took {format_seconds(took)} in total"

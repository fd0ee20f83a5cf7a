"""A game of GEM through the adapter: VAPO, DAPO and GRPO on guess the number.

    bash examples/run_guess_tiny.sh [--seeds 0 1 2 3 4] [--quick]

Every seed has a base model and a pretrained critic of its own, which its arms share. Ends with
table.md: held-out return by step. If interrupted, the same command resumes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ablation.arms import NO_VALUE_CHECKPOINT, VAPO
from runner import command, tables
from runner.arms import Arm, Table, seed_jobs
from runner.jobs import finished
from runner.tables import Cell, Runs

from vapo_megatron.data.storage import replace_file
from vapo_megatron.run.directory import read_rows

STEPS, PER_STEP, READ = 30, 64, 512
"""Policy steps, their responses, and responses that the critic has read before. Arms without one
train on as many more, so that all have the same number."""
RETURN = "evaluation/reward_mean"
ARMS = {
    "vapo": VAPO,
    **{
        recipe: Arm(
            title,
            "",
            (NO_VALUE_CHECKPOINT, "algorithm.gae_unit=token"),
            recipe,
            policy_steps=STEPS + READ // PER_STEP,
        )
        for recipe, title in (("dapo", "DAPO"), ("grpo", "GRPO"))
    },
}
TABLE = Table(
    "guess",
    configs=("tiny.yaml", "guess_tiny.yaml"),
    arms=ARMS,
    has_reward_model=False,
    # One step: all responses are there to be read several times.
    value_steps=1,
    value_changes=(f"algorithm.responses_per_step={READ}", "algorithm.critic_updates_per_step=5"),
    base_sources=(
        "guess/base.py",
        "make_tokenizer.py",
        "making.py",
        "architecture.py",
        "guess/game.py",
    ),
    base_seconds=100.0,
    data_sources=("guess/game.py",),
)
Result = Sequence[Mapping[str, Any]]
"""Rows of a run's metrics."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs and write the table; return 1 if a job failed."""
    out = "runs/guess_tiny, with --quick runs/guess_quick"
    parser = command.options("guess", __doc__, out)
    command.add_seeds(parser, 5)
    parser.add_argument(
        "--quick", action="store_true", help="one seed of VAPO and GRPO, 5 policy steps"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="for all arms")
    return command.main("guess", parser, plan, arguments)


def plan(args: argparse.Namespace) -> command.Plan:
    """Return what the arguments ask for."""
    root = (args.out or Path("runs/guess_quick" if args.quick else "runs/guess_tiny")).resolve()
    seeds, arms, more = args.seeds, dict(ARMS), list(args.overrides)
    if args.quick:
        seeds, arms = seeds[:1], {name: ARMS[name] for name in ("vapo", "grpo")}
        more += ["algorithm.policy_steps=5", "evaluation.every_steps=5"]
    jobs = [job for seed in sorted(set(seeds)) for job in seed_jobs(root, TABLE, seed, arms, more)]

    def write() -> str | None:
        runs = {
            name: {seed: read_rows(job.out / "metrics.jsonl") for seed, job in of_seeds.items()}
            for name, of_seeds in finished(jobs, arms).items()
        }
        titles = {name: arms[name].title for name in arms if name in runs}
        if not titles:
            return None
        text = tables.of_arms("arm", titles, columns(runs), runs)
        text += "\nHalving what is left always wins, with a return of 1.\n"
        replace_file(root / "table.md", text)
        return f"{text}\n{root / 'table.md'}"

    return command.Plan(root, jobs, write, modules=("ablation", "guess"))


def returns(rows: Result) -> dict[float, float]:
    """Return the held-out mean returns by step."""
    return {row["step"]: row[RETURN] for row in rows if RETURN in row}


def columns(runs: Runs) -> dict[str, Cell]:
    """Return the columns of returns, at the steps that all runs have."""
    steps = set.intersection(*(set(returns(rows)) for of in runs.values() for rows in of.values()))

    def at(step: float) -> tables.Measure:
        return lambda rows: returns(rows)[step]

    found = {
        f"after {step:g} steps" if step else "before": tables.mean(at(step))
        for step in sorted(steps)
    }
    found["in the end"] = tables.mean(_last)
    found["each seed"] = tables.each(_last)
    found["less the first arm"] = tables.difference(_last)
    return found


def _last(rows: Result) -> float:
    return list(returns(rows).values())[-1]

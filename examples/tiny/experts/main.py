"""The tiny task with a mixture of experts: router replay off, r2 and r3, beside the dense model.

    bash examples/run_experts_tiny.sh [--seeds 0 1 2] [--quick]

The mixture has 8 experts, of which a router chooses 2 for each token; these two are as large as the
dense model's feed-forward network. vLLM samples in bfloat16 and the trainer computes in float32, so
that their routers differ as they do at scale. Every seed has a base model and a pretrained critic
of either kind, which its arms share. Ends with table.md: held-out accuracy, time, and how often and
how far sampler and trainer differ. If interrupted, the same command resumes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner import command, tables
from runner.arms import Arm, Table, seed_jobs, titles
from runner.jobs import BASE_SOURCES, Job, metrics, results
from runner.tables import Cell, accuracies

DENSE = Table(
    "short",
    configs=("tiny.yaml", "experts_tiny.yaml"),
    arms={tables.FIRST: Arm("dense")},
    has_reward_model=False,
)
EXPERTS = Table(
    "short",
    configs=DENSE.configs,
    arms={
        mode: Arm(f"8 experts, router_replay={mode}", changes=(f"algorithm.router_replay={mode}",))
        for mode in ("off", "r2", "r3")
    },
    has_reward_model=False,
    base_sources=BASE_SOURCES,
    base_options=("--experts", "8"),
    base_seconds=240.0,
)
TABLES = {"dense": DENSE, "experts": EXPERTS}
"""By the folder of their runs."""
Rows = Sequence[Mapping[str, Any]]
"""Of a run's metrics."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs and write the table; return 1 if a job failed."""
    quick = "one seed of the dense model and r3, 3 policy steps"
    parser = command.seeds_options("experts", __doc__, quick, count=3)
    command.add_overrides(parser)
    return command.main("experts", parser, plan, arguments)


def plan(args: argparse.Namespace) -> command.Plan:
    """Return what the arguments ask for."""
    arms, more = {form: dict(table.arms) for form, table in TABLES.items()}, list(args.overrides)
    if args.quick:
        arms["experts"] = {"r3": EXPERTS.arms["r3"]}
        more += ["algorithm.policy_steps=3", "evaluation.every_steps=3"]

    def of_seed(root: Path, seed: int) -> list[Job]:
        return [
            job
            for form, table in TABLES.items()
            for job in seed_jobs(root / form, table, seed, arms[form], more, f"{form}/")
        ]

    return command.seeds_plan(args, "experts", of_seed, markdown, modules=("experts",))


def markdown(jobs: Sequence[Job]) -> str:
    """Return the table of what is finished; empty: nothing is."""
    names, runs = dict[str, str](), dict[str, Mapping[int, Rows]]()
    for form, table in TABLES.items():
        names |= titles(table.arms)
        runs |= results(jobs, table.arms, metrics, f"{form}/")
    return tables.of_finished("arm", names, COLUMNS, runs)


DIFFERENCE = "rollout/logprob_diff_mean"
OWN_ROUTES = "rollout/logprob_diff_own_routes_mean"


def median(name: str, where: str | None = None) -> tables.Measure:
    """Return the median over the steps that have a metric; None: none has.

    where: another metric, which they must have too.
    """

    def read(rows: Rows) -> float | None:
        found = [row[name] for row in rows if name in row and (where or name) in row]
        return statistics.median(found) if found else None

    return read


COLUMNS: dict[str, Cell] = {
    "accuracy before": tables.mean(lambda rows: accuracies(rows)[0][1]),
    "in the end": tables.mean(lambda rows: accuracies(rows)[-1][1]),
    "each seed": tables.each(lambda rows: accuracies(rows)[-1][1]),
    "less the dense one": tables.difference(lambda rows: accuracies(rows)[-1][1]),
    "seconds a step": tables.mean(median("time/step_seconds"), ".1f"),
    "log-probability difference": tables.mean(median(DIFFERENCE), ".2e"),
    "in compared steps": tables.mean(median(DIFFERENCE, OWN_ROUTES), ".2e"),
    "there with own routes": tables.mean(median(OWN_ROUTES), ".2e"),
    "other routes, before updates": tables.mean(median("rollout/other_routes_fraction"), ".2%"),
    "in updates": tables.mean(median("actor/other_routes_fraction"), ".2%"),
}
"""Differences are of sampler and trainer, in nats; routes are of a token in a layer. Compared is
every tenth step (rollout.compare_routes_every), once more with the trainer's own routes."""

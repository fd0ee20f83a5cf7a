"""Retro-Search (arXiv 2504.04383) in miniature: fine-tuning on traces, and on revised traces.

    bash examples/run_revision_tiny.sh [--seeds 0 1 2 3 4] [--quick]

For each seed: a base model that begins again for no reason, its samples of 400 problems, its right
traces as they are and with other endings where it switched, and supervised fine-tuning on either.
Ends with a table of accuracies and lengths on held-out problems. If interrupted, the same command
resumes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from runner import command, tables
from runner.jobs import BASE_SOURCES, Job, Seed, engine, results
from runner.samples import SAMPLES, Measured, measured, read_samples

SOURCES = ("second_thoughts.py", *BASE_SOURCES)
SWITCH, NEVER = "Wait;", "Never"
"""The base model's keyword; one that it does not have, so that all traces stay as they are."""
TRACES = {"own": ("own right traces", NEVER), "revised": ("revised traces", SWITCH)}
TITLES = {"before": "base model", **{f"after_{n}": title for n, (title, _) in TRACES.items()}}
"""By the evaluation of a model."""
FILE = "traces.jsonl"
SAMPLING = (*engine(32, 192), "model.dtype=float32", "reward.num_workers=1")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is done."""

    problems: int = 400
    samples: int = 4
    """Of each of them."""
    steps: int = 60
    test_samples: int = 8


WHOLE = Sizes()
QUICK = Sizes(problems=100, samples=2, steps=6, test_samples=1)


class Result(NamedTuple):
    """What was measured of a model."""

    held_out: Measured
    traces: tuple[int, float] | None
    """That it was trained on, and their mean tokens; None: the base model."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs and write the table; return 1 if a job failed."""
    return command.sized("revision", __doc__, arguments, (WHOLE, QUICK), seed_jobs, markdown)


def seed_jobs(root: Path, seed: int, sizes: Sizes) -> list[Job]:
    """Return a seed's jobs, dependencies first."""
    jobs = Seed(root, seed)
    out, base, train = jobs.out, jobs.out / "base", jobs.out / "data/train.jsonl"

    def add_evaluation(name: str, needs: str, checkpoint: Path) -> None:
        data = out / "data/test.jsonl"
        jobs.add_evaluation(name, (needs, "data"), checkpoint, data, sizes.test_samples, *SAMPLING)

    jobs.add_script("base", SOURCES, "model", "--habit", "switches", seconds=80.0, habit="switches")
    jobs.add_script(
        "data", SOURCES, "problems", "--train", sizes.problems, seconds=5.0, problems=sizes.problems
    )
    jobs.add_evaluation(
        "samples", ("base", "data"), base, train, sizes.samples, *SAMPLING, options=("--token-ids",)
    )
    add_evaluation("before", "base", base)
    for name, (_, keyword) in TRACES.items():
        jobs.add_command(
            name, ("samples",), "trajectories", "--checkpoint", base, "--data", train,
            "--revise", out / "samples" / SAMPLES, "--keywords", keyword, "--separator", ",",
            "--out", out / name / FILE, *SAMPLING, f"seed={seed}", seconds=25.0,
        )  # fmt: skip
        jobs.add_run(
            f"sft_{name}", ("tiny.yaml", "revision_tiny.yaml", "algorithms/sft.yaml"),
            f"seed={seed}", f"algorithm.policy_steps={sizes.steps}", f"model.hf_path={base}",
            f"data.train_path={out / name / FILE}", needs=("base", name), step_seconds=0.5,
        )  # fmt: skip
        add_evaluation(f"after_{name}", f"sft_{name}", out / f"sft_{name}" / "hf_export")
    return list(jobs.jobs.values())


def _result(job: Job) -> Result:
    traces = None
    if job.out.name != "before":
        file = job.out.with_name(job.out.name.removeprefix("after_")) / FILE
        lengths = [len(json.loads(line)["response"]) for line in file.open()]
        traces = len(lengths), sum(lengths) / len(lengths)
    return Result(measured(read_samples(job.out / SAMPLES)), traces)


COLUMNS = {
    "traces": tables.mean(lambda one: one.traces and one.traces[0], ",.0f"),
    "their tokens": tables.mean(lambda one: one.traces and one.traces[1], ".1f"),
    "accuracy": tables.listed(lambda one: one.held_out.accuracy),
    "tokens": tables.listed(lambda one: one.held_out.length, ".1f"),
    "of right responses": tables.mean(lambda one: one.held_out.correct_length, ".1f"),
}


def markdown(jobs: Sequence[Job]) -> str:
    """Return the table of what is finished; empty: nothing is."""
    return tables.of_finished("model", TITLES, COLUMNS, results(jobs, TITLES, _result))

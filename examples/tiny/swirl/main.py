"""SWiRL (arXiv 2504.04736) in miniature: what a filter of trajectories is worth.

    bash examples/run_swirl_tiny.sh [--seeds 0 1 2 3 4] [--quick]

For each seed: a base model, its trajectories on 1,500 questions (five each), the states that the
filters keep, and a policy trained on each filter's states, where one action is sampled in a state
and judged by it. Ends with a table of accuracies from beginning to end. If interrupted, the same
command resumes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner import command, tables
from runner.jobs import BASE_SOURCES, Job, Seed, engine, results
from runner.samples import mean_accuracy, read_summary

ENVIRONMENT = "swirl/steps.py"
FILTERS = ("process", "outcome", "none")
ARMS = {
    "process": ("process", "process", ("algorithms/grpo.yaml",)),
    "outcome": ("outcome", "outcome", ("algorithms/grpo.yaml",)),
    "none": ("none", "none", ("algorithms/grpo.yaml",)),
    "gae": ("process, with a critic", "process", ()),
}
"""Name -> title, filter, overlays."""
TITLES = {"before": "base model", **{f"after_{n}": title for n, (title, *_) in ARMS.items()}}
"""By the evaluation of a model."""
STATES, TRAJECTORIES = "states.jsonl", "trajectories.jsonl"
EPISODES = (
    "reward.verifier=environment", "environment.max_turns=13", "environment.max_action_tokens=20",
    *engine(64, 208), "model.dtype=float32",
    # See the configuration.
    "rollout.stop_token_ids=[1,5]",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is done."""

    questions: int = 1500
    trajectories: int = 5
    """Of each question."""
    steps: int = 16
    value_steps: int = 4
    """Of value pretraining, where there is a critic."""
    samples: int = 4
    """Of each held-out problem."""


WHOLE = Sizes()
QUICK = Sizes(questions=300, steps=3, value_steps=1, samples=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs and write the table; return 1 if a job failed."""
    return command.sized("swirl", __doc__, arguments, (WHOLE, QUICK), seed_jobs, markdown)


def seed_jobs(root: Path, seed: int, sizes: Sizes) -> list[Job]:
    """Return a seed's jobs, dependencies first."""
    jobs = Seed(root, seed)
    out, given = jobs.out, (*EPISODES, f"environment.use=examples/tiny/{ENVIRONMENT}:Steps")

    def add_evaluation(name: str, needs: str, checkpoint: Path) -> None:
        jobs.add_evaluation(
            name, (needs, "data"), checkpoint, out / "data/test.jsonl", sizes.samples, *given,
            seconds=30.0, sources=(ENVIRONMENT,),
        )  # fmt: skip

    jobs.add_script("base", BASE_SOURCES, seconds=100.0)
    jobs.add_script(
        "data", ("task.py",), "--train", sizes.questions, seconds=2.0, questions=sizes.questions
    )
    jobs.add_command(
        "trajectories", ("base", "data"), "trajectories", "--checkpoint", out / "base",
        "--data", out / "data/train.jsonl", "--samples", sizes.trajectories,
        "--out", out / "trajectories" / TRAJECTORIES, *given, f"seed={seed}", seconds=60.0,
        sources=(ENVIRONMENT,),
    )  # fmt: skip
    add_evaluation("before", "base", out / "base")
    for name in FILTERS:
        jobs.add_command(
            f"states_{name}", ("trajectories",), "states", out / "trajectories" / TRAJECTORIES,
            "--filter", name, "--out", out / f"states_{name}" / STATES,
            f"reward.verifier=examples/tiny/{ENVIRONMENT}:reasonable",
            seconds=15.0, sources=(ENVIRONMENT,),
        )  # fmt: skip
    for name, (_, kept, overlays) in ARMS.items():
        steps = (f"algorithm.value_pretraining_steps={sizes.value_steps}",)
        jobs.add_run(
            name, ("tiny.yaml", "swirl_tiny.yaml", *overlays), f"seed={seed}",
            f"algorithm.policy_steps={sizes.steps}", f"model.hf_path={out / 'base'}",
            f"data.train_path={out / f'states_{kept}' / STATES}", *(() if overlays else steps),
            needs=("base", f"states_{kept}"), step_seconds=3.0, sources=(ENVIRONMENT,),
        )  # fmt: skip
        add_evaluation(f"after_{name}", name, out / name / "hf_export")
    return list(jobs.jobs.values())


def _result(job: Job) -> dict[str, Any]:
    """Read a model's accuracy, and the counts of the states that it was trained on."""
    found = {"accuracy": mean_accuracy(read_summary(job.out))}
    if job.out.name != "before":
        _, kept, _ = ARMS[job.out.name.removeprefix("after_")]
        states = job.out.with_name(f"states_{kept}") / STATES
        counts = json.loads(states.with_suffix(".summary.json").read_text())
        found |= counts["filters"][kept]
    return found


COLUMNS = {
    "accuracy": tables.listed(lambda row: row["accuracy"]),
    **{
        name.replace("_", "-"): tables.mean(lambda row, name=name: row.get(name), ",.0f")
        for name in ("trajectories", "sub_trajectories", "states")
    },
}


def markdown(jobs: Sequence[Job]) -> str:
    """Return the table of what is finished; empty: nothing is."""
    return tables.of_finished("filter", TITLES, COLUMNS, results(jobs, TITLES, _result))

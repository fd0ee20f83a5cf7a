"""SWiRL (arXiv 2504.04736) in miniature: what a filter of trajectories is worth.

    bash examples/run_swirl_tiny.sh [--seeds 0 1 2 3 4] [--quick]

For each seed: a base model, its trajectories on 1,500 questions (five each), the states that the
filters keep, and a policy trained on each filter's states, where one action is sampled in a state
and judged by it. Ends with a table of accuracies from beginning to end. If interrupted, the same
command resumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner import command, tables
from runner.jobs import BASE_SOURCES, Job, Seed, finished

ENVIRONMENT = "swirl/steps.py"
FILTERS = {"process": "process", "outcome": "outcome", "none": "none"}
ARMS = {
    "process": ("process", "process", ("algorithms/grpo.yaml",)),
    "outcome": ("outcome", "outcome", ("algorithms/grpo.yaml",)),
    "none": ("none", "none", ("algorithms/grpo.yaml",)),
    "gae": ("process, with a critic", "process", ()),
}
"""Name -> title, filter, overlays."""
STATES, TRAJECTORIES, SAMPLES = "states.jsonl", "trajectories.jsonl", "samples.jsonl"
EPISODES = (
    "reward.verifier=environment", "environment.max_turns=13", "environment.max_action_tokens=20",
    "rollout.max_prompt_tokens=64", "rollout.max_response_tokens=208",
    "rollout.max_num_sequences=256", "rollout.kv_cache_bytes=67108864", "model.dtype=float32",
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
    parser = command.sized_options("swirl", __doc__)
    return command.main("swirl", parser, plan, arguments)


def plan(args: argparse.Namespace) -> command.Plan:
    """Return what the arguments ask for."""
    sizes = QUICK if args.quick else WHOLE
    return command.sized_plan(
        args, "swirl", lambda root, seed: seed_jobs(root, seed, sizes),
        lambda jobs: markdown(results(jobs)),
    )  # fmt: skip


def seed_jobs(root: Path, seed: int, sizes: Sizes) -> list[Job]:
    """Return a seed's jobs, dependencies first.

    Args:
        root: directory of the miniature.
        seed: of models, questions and runs.
        sizes: how much is done.
    """
    jobs = Seed(root, seed)
    out, environment = jobs.out, f"environment.use=examples/tiny/{ENVIRONMENT}:Steps"
    given = (*EPISODES, environment, f"seed={seed}")
    test = ("--data", out / "data/test.jsonl", "--samples", sizes.samples)

    def add_evaluation(name: str, needs: Sequence[str], checkpoint: Path) -> None:
        jobs.add_command(
            name, (*needs, "data"), "evaluate", "--checkpoint", checkpoint, *test,
            "--temperature", 1, "--top-p", 1, "--out", out / name / SAMPLES, *given,
            seconds=30.0, sources=(ENVIRONMENT,),
        )  # fmt: skip

    jobs.add_script("base", BASE_SOURCES, seconds=100.0)
    jobs.add_script(
        "data", ("task.py",), "--train", sizes.questions, seconds=2.0, questions=sizes.questions
    )
    jobs.add_command(
        "trajectories", ("base", "data"), "trajectories", "--checkpoint", out / "base",
        "--data", out / "data/train.jsonl", "--samples", sizes.trajectories,
        "--out", out / "trajectories" / TRAJECTORIES, *given, seconds=60.0, sources=(ENVIRONMENT,),
    )  # fmt: skip
    add_evaluation("before", ("base",), out / "base")
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
        add_evaluation(f"after_{name}", (name,), out / name / "hf_export")
    return list(jobs.jobs.values())


def results(jobs: Sequence[Job]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return what was measured of the base model and of the arms, by seed."""
    titles = {"before": "before", **{f"after_{name}": name for name in ARMS}}
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for job, name in titles.items():
        for seed, done in finished(jobs, [job]).get(job, {}).items():
            summary = json.loads((done.out / SAMPLES).with_suffix(".json").read_text())
            (average,) = (k for k in summary["statistics"] if k.startswith("avg@"))
            row = {"accuracy": summary["statistics"][average]["value"]}
            if name in ARMS:
                states = done.out.with_name(f"states_{ARMS[name][1]}") / STATES
                counts = json.loads(states.with_suffix(".summary.json").read_text())
                row |= counts["filters"][ARMS[name][1]]
            found.setdefault(name, {})[seed] = row
    return found


def markdown(found: tables.Runs) -> str:
    """Return the table: mean, standard deviation and each seed. Empty: nothing is found."""
    if not found:
        return ""
    titles = {"before": "base model"} | {name: title for name, (title, *_) in ARMS.items()}
    counts = {
        title: tables.mean(_of(name), ",.0f")
        for title, name in (
            ("trajectories", "trajectories"),
            ("sub-trajectories", "sub_trajectories"),
            ("states", "states"),
        )
    }
    columns = {"accuracy": tables.listed(_of("accuracy")), **counts}
    return tables.of_arms("filter", {n: titles[n] for n in titles if n in found}, columns, found)


def _of(name: str) -> tables.Measure:
    def measure(row: Mapping[str, Any]) -> float | None:
        return row.get(name)

    return measure

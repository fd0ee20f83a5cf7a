"""Probes of reflection (arXiv 2504.04022) in miniature, before and after reinforcement learning.

    bash examples/run_reflection_tiny.sh [--seeds 0 1 2 3 4] [--quick]

For each seed: a base model that errs and often corrects itself, VAPO on it, and what both make of
chains of thought with an error, with and without the trigger `Wait;`: an error in the middle or in
the last step, and the base model's own wrong chains. Ends with tables of the metrics. If
interrupted, the same command resumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from revision.main import SAMPLES, SAMPLING, SOURCES
from runner import command, tables
from runner.jobs import Job, Seed, finished

TRIGGER = "Wait;"
TASKS = {
    "middle": "an error in the middle", "last": "an error in the last step",
    "self": "its own wrong chains",
}  # fmt: skip
MODELS = {"base": "base model", "vapo": "after VAPO"}
TRIGGERS = {"": "", "_trigger": f", with `{TRIGGER}`"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is done."""

    steps: int = 16
    value_steps: int = 4
    samples: int = 2
    """Of each problem and probe."""


WHOLE = Sizes()
QUICK = Sizes(steps=3, value_steps=1, samples=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs and write the tables; return 1 if a job failed."""
    parser = command.sized_options("reflection", __doc__)
    return command.main("reflection", parser, plan, arguments)


def plan(args: argparse.Namespace) -> command.Plan:
    """Return what the arguments ask for."""
    sizes = QUICK if args.quick else WHOLE
    return command.sized_plan(
        args, "reflection", lambda root, seed: seed_jobs(root, seed, sizes),
        lambda jobs: markdown(accuracies(jobs), results(jobs)),
    )  # fmt: skip


def seed_jobs(root: Path, seed: int, sizes: Sizes) -> list[Job]:
    """Return a seed's jobs, dependencies first.

    Args:
        root: directory of the miniature.
        seed: of models, problems and runs.
        sizes: how much is done.
    """
    jobs = Seed(root, seed)
    out = jobs.out
    checkpoints = {"base": out / "base", "vapo": out / "vapo/hf_export"}
    habit = "corrections"

    def add_evaluation(name: str, model: str, needs: str, data: Path, *probe: object) -> None:
        jobs.add_command(
            name, (model, needs), "evaluate", "--checkpoint", checkpoints[model], "--data", data,
            "--samples", sizes.samples, "--temperature", 1, "--top-p", 1, *probe,
            "--out", out / name / SAMPLES, *SAMPLING, "rollout.max_prompt_tokens=160",
            f"seed={seed}", seconds=25.0,
        )  # fmt: skip

    jobs.add_script("base", SOURCES, "model", "--habit", habit, seconds=80.0, habit=habit)
    jobs.add_script("data", SOURCES, "problems", seconds=5.0)
    jobs.add_run(
        "vapo", ("tiny.yaml", "reflection_tiny.yaml"), f"seed={seed}",
        f"model.hf_path={out / 'base'}", f"data.train_path={out / 'data/train.jsonl'}",
        f"algorithm.value_pretraining_steps={sizes.value_steps}",
        f"algorithm.policy_steps={sizes.steps}", needs=("base", "data"), step_seconds=3.0,
    )  # fmt: skip
    for model in MODELS:
        add_evaluation(f"{model}_samples", model, "data", out / "data/test.jsonl")
    jobs.add_command(
        "self", ("base_samples",), "probe", "self", "--samples", out / "base_samples" / SAMPLES,
        "--separator", ",", "--skip-unusable", "--out", out / "self/self.parquet", seconds=8.0,
    )  # fmt: skip
    for model in MODELS:
        for suffix in TRIGGERS:
            probe = ("--prefix-column", "prefix", "--reflects-words", "Wait")
            probe += ("--trigger", TRIGGER) if suffix else ()
            data = out / "data/probes.jsonl"
            add_evaluation(f"{model}_given{suffix}", model, "data", data, *probe)
            data = out / "self/self.parquet"
            add_evaluation(f"{model}_self{suffix}", model, "self", data, *probe)
    return list(jobs.jobs.values())


def _summaries(jobs: Sequence[Job], name: str) -> dict[int, Mapping[str, Any]]:
    return {
        seed: json.loads((job.out / SAMPLES).with_suffix(".json").read_text())
        for seed, job in finished(jobs, [name]).get(name, {}).items()
    }


def accuracies(jobs: Sequence[Job]) -> dict[str, dict[int, float]]:
    """Return the accuracy on held-out problems, without a probe, by model and seed."""
    found: dict[str, dict[int, float]] = {}
    for model in MODELS:
        for seed, summary in _summaries(jobs, f"{model}_samples").items():
            (average,) = (k for k in summary["statistics"] if k.startswith("avg@"))
            found.setdefault(model, {})[seed] = summary["statistics"][average]["value"]
    return found


def results(jobs: Sequence[Job]) -> dict[str, dict[str, dict[int, Mapping[str, Any]]]]:
    """Return the metrics of reflection by task, by model and trigger, and by seed."""
    found: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
    for model in MODELS:
        for suffix in TRIGGERS:
            for part, tasks in (("given", ("middle", "last")), ("self", ("self",))):
                for seed, summary in _summaries(jobs, f"{model}_{part}{suffix}").items():
                    for task in tasks:
                        # A file of one task has no division.
                        key = "all" if part == "self" else f"task {task}"
                        metrics = summary["reflection"][key]["metrics"]
                        of_task = found.setdefault(task, {})
                        of_task.setdefault(f"{model}{suffix}", {})[seed] = metrics
    return found


COLUMNS = {
    name.replace("_", ", "): tables.mean(
        lambda metrics, name=name: metrics[name] and metrics[name]["value"]
    )
    for name in (
        "accuracy", "reflection", "accurate_explicit", "accurate_implicit", "correlation",
    )
}  # fmt: skip


def markdown(plain: tables.Runs, found: Mapping[str, tables.Runs]) -> str:
    """Return a table without probes, and one of each task."""
    parts = []
    if plain:
        names = {model: MODELS[model] for model in MODELS if model in plain}
        columns = {"accuracy": tables.listed(lambda value: value)}
        parts.append(tables.of_arms("without a probe", names, columns, plain))
    for task, title in TASKS.items():
        runs = found.get(task, {})
        names = {
            f"{model}{suffix}": f"{MODELS[model]}{TRIGGERS[suffix]}"
            for model in MODELS
            for suffix in TRIGGERS
            if f"{model}{suffix}" in runs
        }
        if names:
            parts.append(tables.of_arms(title, names, COLUMNS, runs))
    return "\n".join(parts)

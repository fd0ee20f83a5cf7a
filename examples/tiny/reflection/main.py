"""Probes of reflection (arXiv 2504.04022) in miniature, before and after reinforcement learning.

    bash examples/run_reflection_tiny.sh [--seeds 0 1 2 3 4] [--quick]

For each seed: a base model that errs and often corrects itself, VAPO on it, and what both make of
chains of thought with an error, with and without the trigger `Wait;`: an error in the middle or in
the last step, and the base model's own wrong chains. Ends with tables of the metrics. If
interrupted, the same command resumes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner import command, tables
from runner.jobs import BASE_SOURCES, Job, Seed, engine, results
from runner.samples import SAMPLES, mean_accuracy, read_summary

SOURCES = ("second_thoughts.py", *BASE_SOURCES)
SAMPLING = (
    *engine(32, 192), "model.dtype=float32", "reward.num_workers=1",
    # The last value counts: probes are longer than problems.
    "rollout.max_prompt_tokens=160",
)  # fmt: skip
TRIGGER = "Wait;"
TASKS = {
    "an error in the middle": ("given", "task middle"),
    "an error in the last step": ("given", "task last"),
    # A file of one task has no division.
    "its own wrong chains": ("self", "all"),
}
"""Title -> evaluations, and the part of their summaries."""
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
    return command.sized("reflection", __doc__, arguments, (WHOLE, QUICK), seed_jobs, markdown)


def seed_jobs(root: Path, seed: int, sizes: Sizes) -> list[Job]:
    """Return a seed's jobs, dependencies first."""
    jobs = Seed(root, seed)
    out = jobs.out
    checkpoints = {"base": out / "base", "vapo": out / "vapo/hf_export"}
    habit = "corrections"

    def add_evaluation(name: str, model: str, needs: str, data: Path, *probe: str) -> None:
        jobs.add_evaluation(
            name, (model, needs), checkpoints[model], data, sizes.samples, *SAMPLING, options=probe
        )

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


COLUMNS = {
    name.replace("_", ", "): tables.mean(
        lambda metrics, name=name: metrics[name] and metrics[name]["value"]
    )
    for name in (
        "accuracy", "reflection", "accurate_explicit", "accurate_implicit", "correlation",
    )
}  # fmt: skip


def markdown(jobs: Sequence[Job]) -> str:
    """Return a table without probes, and one of each task; empty: nothing is finished."""
    names = {f"{model}_samples": title for model, title in MODELS.items()}
    plain = results(jobs, names, lambda job: mean_accuracy(read_summary(job.out)))
    columns = {"accuracy": tables.listed(lambda value: value)}
    parts = [tables.of_finished("without a probe", names, columns, plain)]
    for title, (evaluation, key) in TASKS.items():

        def read(job: Job, key: str = key) -> Mapping[str, Any]:
            return read_summary(job.out)["reflection"][key]["metrics"]

        names = {
            f"{model}_{evaluation}{suffix}": f"{of_model}{told}"
            for model, of_model in MODELS.items()
            for suffix, told in TRIGGERS.items()
        }
        parts.append(tables.of_finished(title, names, COLUMNS, results(jobs, names, read)))
    return "\n".join(filter(None, parts))

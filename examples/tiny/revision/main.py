"""Retro-Search (arXiv 2504.04383) in miniature: fine-tuning on traces, and on revised traces.

    bash examples/run_revision_tiny.sh [--seeds 0 1 2 3 4] [--quick]

For each seed: a base model that begins again for no reason, its samples of 400 problems, its right
traces as they are and with other endings where it switched, and supervised fine-tuning on either.
Ends with a table of accuracies and lengths on held-out problems. If interrupted, the same command
resumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from runner import command, tables
from runner.jobs import Job, Seed, finished
from runner.samples import Measured, measured, read_samples

SOURCES = (
    "second_thoughts.py", "make_base_model.py", "make_tokenizer.py", "making.py", "architecture.py",
    "skill.py", "task.py",
)  # fmt: skip
SWITCH, NEVER = "Wait;", "Never"
"""The base model's keyword; one that it does not have, so that all traces stay as they are."""
TRACES = {"own": ("own right traces", NEVER), "revised": ("revised traces", SWITCH)}
SAMPLES, FILE = "samples.jsonl", "traces.jsonl"
SAMPLING = (
    "rollout.max_prompt_tokens=32", "rollout.max_response_tokens=192",
    "rollout.max_num_sequences=256", "rollout.kv_cache_bytes=67108864", "model.dtype=float32",
    "reward.num_workers=1",
)  # fmt: skip


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
    parser = command.sized_options("revision", __doc__)
    return command.main("revision", parser, plan, arguments)


def plan(args: argparse.Namespace) -> command.Plan:
    """Return what the arguments ask for."""
    sizes = QUICK if args.quick else WHOLE
    return command.sized_plan(
        args, "revision", lambda root, seed: seed_jobs(root, seed, sizes),
        lambda jobs: markdown(results(jobs)),
    )  # fmt: skip


def seed_jobs(root: Path, seed: int, sizes: Sizes) -> list[Job]:
    """Return a seed's jobs, dependencies first.

    Args:
        root: directory of the miniature.
        seed: of models, problems and runs.
        sizes: how much is done.
    """
    jobs = Seed(root, seed)
    out, sampling = jobs.out, (*SAMPLING, f"seed={seed}")
    train = ("--checkpoint", out / "base", "--data", out / "data/train.jsonl")

    def add_evaluation(name: str, needs: str, checkpoint: Path) -> None:
        jobs.add_command(
            name, (needs, "data"), "evaluate", "--checkpoint", checkpoint,
            "--data", out / "data/test.jsonl", "--samples", sizes.test_samples,
            "--temperature", 1, "--top-p", 1, "--out", out / name / SAMPLES, *sampling,
            seconds=25.0,
        )  # fmt: skip

    jobs.add_script("base", SOURCES, "model", "--habit", "switches", seconds=80.0, habit="switches")
    jobs.add_script(
        "data", SOURCES, "problems", "--train", sizes.problems, seconds=5.0, problems=sizes.problems
    )
    jobs.add_command(
        "samples", ("base", "data"), "evaluate", *train, "--samples", sizes.samples,
        "--temperature", 1, "--top-p", 1, "--token-ids", "--out", out / "samples" / SAMPLES,
        *sampling, seconds=25.0,
    )  # fmt: skip
    add_evaluation("before", "base", out / "base")
    for name, (_, keyword) in TRACES.items():
        jobs.add_command(
            name, ("samples",), "trajectories", *train, "--revise", out / "samples" / SAMPLES,
            "--keywords", keyword, "--separator", ",", "--out", out / name / FILE, *sampling,
            seconds=25.0,
        )  # fmt: skip
        jobs.add_run(
            f"sft_{name}", ("tiny.yaml", "revision_tiny.yaml", "algorithms/sft.yaml"),
            f"seed={seed}", f"algorithm.policy_steps={sizes.steps}", f"model.hf_path={out}/base",
            f"data.train_path={out / name / FILE}", needs=("base", name), step_seconds=0.5,
        )  # fmt: skip
        add_evaluation(f"after_{name}", f"sft_{name}", out / f"sft_{name}" / "hf_export")
    return list(jobs.jobs.values())


def results(jobs: Sequence[Job]) -> dict[str, dict[int, Result]]:
    """Return what was measured of the base model and of the trained ones, by seed."""
    found: dict[str, dict[int, Result]] = {}
    for job, name in {"before": "before", **{f"after_{name}": name for name in TRACES}}.items():
        for seed, done in finished(jobs, [job]).get(job, {}).items():
            traces = None
            if name in TRACES:
                lines = (done.out.with_name(name) / FILE).read_text().splitlines()
                lengths = [len(json.loads(line)["response"]) for line in lines]
                traces = len(lengths), sum(lengths) / len(lengths)
            held_out = measured(read_samples(done.out / SAMPLES))
            found.setdefault(name, {})[seed] = Result(held_out, traces)
    return found


COLUMNS = {
    "traces": tables.mean(lambda one: one.traces and one.traces[0], ",.0f"),
    "their tokens": tables.mean(lambda one: one.traces and one.traces[1], ".1f"),
    "accuracy": tables.listed(lambda one: one.held_out.accuracy),
    "tokens": tables.listed(lambda one: one.held_out.length, ".1f"),
    "of right responses": tables.mean(lambda one: one.held_out.correct_length, ".1f"),
}


def markdown(found: tables.Runs) -> str:
    """Return the table: mean, standard deviation and each seed. Empty: nothing is found."""
    if not found:
        return ""
    titles = {"before": "base model"} | {name: title for name, (title, _) in TRACES.items()}
    return tables.of_arms("model", {n: titles[n] for n in titles if n in found}, COLUMNS, found)

"""Pairwise-RL (arXiv 2504.04950) in miniature: what the reference of a pairwise judge is worth.

    bash examples/run_bestof_tiny.sh [--seeds 0 1 2 3 4] [--quick]

A judge, which the script above has trained and serves, says whether a response is better than a
reference. For each seed: a base model, a reward model, the best of the base model's eight samples
by the reward model (vapo select --best-of), and VAPO as algorithms/pairwise_rl.yaml has it, with
three kinds of reference: that best sample's answer, the first sample's, and the right one. Ends
with a table of accuracies. If interrupted, the same command resumes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from runner import command, tables
from runner.jobs import BASE_SOURCES, Job, Seed, engine, metrics, results
from runner.tables import accuracies

ARMS = {
    "best": "best of 8 by the reward model", "single": "a single sample", "truth": "the right one",
}  # fmt: skip
"""A kind of reference -> title."""
CONFIGS = ("tiny.yaml", "bestof_tiny.yaml", "algorithms/pairwise_rl.yaml")
SAMPLING = (
    "reward.verifier=reward_model", "model.dtype=float32", *engine(64, 192),
    "parallel.max_tokens_per_microbatch=16384",
    # The score that the tiny reward model gives a response is a logit.
    "reward.from_score=[-20,20]",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is done."""

    problems: int = 512
    samples: int = 8
    steps: int = 16
    value_steps: int = 4


WHOLE = Sizes()
QUICK = Sizes(problems=64, samples=4, steps=2, value_steps=1)


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured of an arm."""

    before: float
    after: float
    """Held-out accuracies by the ground truth."""
    right: float
    """Share of the references that are right."""
    beaten: float
    """Mean probability, by the judge, that a response of the last step is better than its
    reference."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs and write the table; return 1 if a job failed."""
    parser = command.seeds_options("bestof", __doc__)
    parser.add_argument("--judge", required=True, metavar="URL", help="of its server, with /v1")
    return command.main("bestof", parser, plan, arguments)


def plan(args: argparse.Namespace) -> command.Plan:
    """Return what the arguments ask for."""
    sizes = QUICK if args.quick else WHOLE
    return command.seeds_plan(
        args, "bestof", lambda root, seed: seed_jobs(root, seed, sizes, args.judge), markdown
    )


def seed_jobs(root: Path, seed: int, sizes: Sizes, judge: str) -> list[Job]:
    """Return a seed's jobs, dependencies first; judge: URL of its server."""
    jobs = Seed(root, seed)
    out = jobs.out
    jobs.add_script("base", BASE_SOURCES, seconds=100.0)
    jobs.add_script(
        "data", ("task.py",), "--train", sizes.problems, seconds=2.0, problems=sizes.problems
    )
    jobs.add_script(
        "reward_model", ("make_reward_model.py", "making.py", "sampling.py", "task.py"),
        "--base", out / "base", needs=("base",), seconds=40.0,
    )  # fmt: skip
    jobs.add_command(
        "chosen", ("base", "reward_model", "data"), "select", "--checkpoint", out / "base",
        "--data", out / "data/train.jsonl", "--samples", sizes.samples, "--best-of", "best",
        "--out", out / "chosen/prompts.parquet", *SAMPLING,
        f"model.reward_hf_path={out / 'reward_model'}", f"seed={seed}", seconds=40.0,
    )  # fmt: skip
    jobs.add_script(
        "references", ("bestof/references.py", "task.py"), "--chosen",
        out / "chosen/prompts.parquet", "--test", out / "data/test.jsonl", needs=("chosen",),
        seconds=3.0,
    )  # fmt: skip
    for name in ARMS:
        jobs.add_run(
            name, CONFIGS, f"seed={seed}", f"model.hf_path={out / 'base'}",
            f"data.train_path={out / 'references' / name}.jsonl",
            f"evaluation.path={out / 'references/test.jsonl'}",
            f"algorithm.value_pretraining_steps={sizes.value_steps}",
            f"algorithm.policy_steps={sizes.steps}", f"evaluation.every_steps={sizes.steps}",
            f"reward.verifiers.pairwise.base_url={judge}",
            needs=("base", "references"), step_seconds=5.0,
        )  # fmt: skip
    return list(jobs.jobs.values())


def _result(job: Job) -> Result:
    rows, file = metrics(job), job.out.with_name("references") / f"{job.out.name}.jsonl"
    measured = [value for _, value in accuracies(rows)]
    given = [json.loads(line) for line in file.open()]
    right = sum(row["reference"] == row["answer"] for row in given) / len(given)
    beaten = [row["reward/mean"] for row in rows if "reward/mean" in row][-1]
    return Result(measured[0], measured[-1], right, beaten)


COLUMNS = {
    "right references": tables.mean(lambda one: one.right),
    "accuracy before": tables.mean(lambda one: one.before),
    "after": tables.listed(lambda one: one.after),
    "wins against the reference": tables.mean(lambda one: one.beaten),
}


def markdown(jobs: Sequence[Job]) -> str:
    """Return the table of what is finished; empty: nothing is."""
    return tables.of_finished("reference", ARMS, COLUMNS, results(jobs, ARMS, _result))

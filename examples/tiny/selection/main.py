"""Pre-PPO (arXiv 2503.22230) in miniature: selected against random prompts of the same number.

    bash examples/run_selection_tiny.sh [--seeds 0 1 2] [--steps 12]

The reward, weak_judge.py, can be hacked on a third of the problems. `vapo select --hardest` keeps
the prompts on which it scores the base model lowest. An arm trains on these, one on as many random
prompts, and one on the random prompts by the ground truth; they differ in nothing else. A last one
has the random prompts in another order, as that paper has mathematics and code: those that cannot
be hacked first. Ends with a table of held-out accuracies. If interrupted, the same command resumes.
"""

from __future__ import annotations

import argparse
import collections
import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner import command, tables
from runner.jobs import BASE_SOURCES, Job, Seed, engine, metrics, results

from selection.problems import KEPT
from vapo_megatron.config.metrics import accuracy_name
from vapo_megatron.data.storage import replace_file

ARMS = {
    "selected": ("selected", "chosen/prompts.parquet", ()),
    "random": ("random", "data/random.jsonl", ()),
    "truth": ("random, judged by the ground truth", "data/random.jsonl", ("reward.verifier=math",)),
    "first": ("random, what cannot be hacked first", None, ()),
}
"""Name -> title, training file in the seed's directory, overrides. None: see `_rest_first`."""
CONFIGS = ("tiny.yaml", "ablation_tiny.yaml", "algorithms/grpo.yaml", "selection_tiny.yaml")
JUDGE = "selection/weak_judge.py"
SELECT = (
    "--samples", "8", "--hardest", str(KEPT), "reward.verifier=weak_judge:WeakJudge",
    "model.dtype=float32", *engine(64, 192),
)  # fmt: skip
JUDGES = ("rest", "hackable", "hackable_weak")
COLUMNS = {
    title: tables.listed(operator.itemgetter(name), form)
    for title, name, form in (
        ("accuracy", "all", ".3f"),
        ("cannot be hacked", "rest", ".3f"),
        ("can be hacked", "hackable", ".3f"),
        ("as the weak judge sees it", "hackable_weak", ".3f"),
        ("tokens", "tokens", ".0f"),
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs and write the table; return 1 if a job failed."""
    parser = command.options("selection", __doc__, "runs/selection_tiny")
    command.add_seeds(parser)
    parser.add_argument(
        "--steps", type=command.at_least(1), default=12, metavar="N", help="of an arm (12)"
    )
    return command.main("selection", parser, plan, arguments)


def plan(args: argparse.Namespace) -> command.Plan:
    """Return what the arguments ask for."""
    root = (args.out or Path("runs/selection_tiny")).resolve()
    jobs = [job for seed in sorted(set(args.seeds)) for job in seed_jobs(root, seed, args.steps)]

    def write() -> None:
        text = markdown(measured(jobs))
        replace_file(root / "table.md", text)
        print(f"\n{text}\n{root / 'table.md'}")

    return command.Plan(root, jobs, write, modules=("selection",))


def seed_jobs(root: Path, seed: int, steps: int) -> list[Job]:
    """Return a seed's jobs, dependencies first; steps: of each arm."""
    jobs = Seed(root, seed)
    out = jobs.out
    jobs.add_script("base", BASE_SOURCES, seconds=60.0)
    jobs.add_script("data", ("selection/problems.py", "task.py", JUDGE), seconds=0.5)
    jobs.add_command(
        "chosen", ("base", "data"), "select", "--checkpoint", out / "base",
        "--data", out / "data/pool.jsonl", "--out", out / "chosen/prompts.parquet",
        *SELECT, f"seed={seed}", seconds=60.0, sources=(JUDGE,),
    )  # fmt: skip
    for name, (_, problems, own) in ARMS.items():
        data = [f"data.train_path={out / problems}"] if problems else _rest_first(out, steps)
        jobs.add_run(
            name, CONFIGS, f"seed={seed}", f"algorithm.policy_steps={steps}",
            f"model.hf_path={out / 'base'}", *data,
            f"evaluation.path={out / 'data/test.jsonl'}", *own, sources=(JUDGE,), step_seconds=4.0,
            needs=("base", "data", *(["chosen"] if name == "selected" else [])),
        )  # fmt: skip
    return list(jobs.jobs.values())


def _rest_first(out: Path, steps: int) -> list[str]:
    """Return the overrides of two sources, of which one has no prompts in the first half.

    A third of the random prompts can be hacked. They are two thirds of the second half, so that
    all steps together have as many as without an order.
    """
    half = steps // 2
    sources = {
        "rest": {"path": f"{out}/data/rest.jsonl"},
        "hackable": {
            "path": f"{out}/data/hackable.jsonl", "weight": 2,
            "schedule": [[half - 1, 0], [half, 1]],
        },
    }  # fmt: skip
    return ["data.train_path=null", f"data.sources={json.dumps(sources)}"]


def measured(jobs: Sequence[Job]) -> dict[str, dict[int, dict[str, float]]]:
    """Return the held-out numbers of the arms at their end, and of the base model, by seed.

    The accuracy is of all held-out problems by the ground truth, weighted as they occur.
    """
    ends = results(jobs, ARMS, _ends)
    # The arms of a seed start from one model.
    base = {seed: first for of in reversed(ends.values()) for seed, (first, _) in of.items()}
    arms = {name: {seed: last for seed, (_, last) in of.items()} for name, of in ends.items()}
    return {"base": base, **arms}


def _ends(job: Job) -> list[dict[str, float]]:
    rows = [row for row in metrics(job) if accuracy_name(row)]
    file = job.out.with_name("data") / "test.jsonl"
    count = collections.Counter(json.loads(line)["verifier"] for line in file.open())
    return [_numbers(row, count) for row in (rows[0], rows[-1])]


def _numbers(row: Mapping[str, Any], count: Mapping[str, int]) -> dict[str, float]:
    average = str(accuracy_name(row)).removeprefix("evaluation/")
    by = {name: row[f"evaluation/by_verifier/{name}/{average}"] for name in JUDGES}
    whole = count["rest"] * by["rest"] + count["hackable"] * by["hackable"]
    length = row["evaluation/by_verifier/hackable/response_length_mean"]
    return {**by, "all": whole / (count["rest"] + count["hackable"]), "tokens": length}


def markdown(found: tables.Runs) -> str:
    """Return the table: mean, standard deviation and each seed."""
    titles = {"base": "base model"} | {name: title for name, (title, *_) in ARMS.items()}
    return tables.of_arms("prompts", {n: titles[n] for n in titles if found.get(n)}, COLUMNS, found)

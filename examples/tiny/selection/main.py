"""Pre-PPO (arXiv 2503.22230) in miniature: selected against random prompts of the same number.

    bash examples/run_selection_tiny.sh [--seeds 0 1 2] [--steps 12]

The reward, weak_judge.py, can be hacked on a third of the problems. `vapo select --hardest` keeps
the prompts on which it scores the base model lowest. An arm trains on these, one on as many random
prompts, and one on the random prompts by the ground truth; they differ in nothing else. Ends with a
table of held-out accuracies. If interrupted, the same command resumes.
"""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner import command, tables
from runner.jobs import BASE_SOURCES, Job, Seed, is_finished
from runner.tables import spread

from selection.problems import KEPT
from vapo_megatron.config.metrics import accuracy_name
from vapo_megatron.data.storage import replace_file
from vapo_megatron.run.directory import read_rows

ARMS = {
    "selected": ("selected", "chosen/prompts.parquet", ()),
    "random": ("random", "data/random.jsonl", ()),
    "truth": ("random, judged by the ground truth", "data/random.jsonl", ("reward.verifier=math",)),
}
"""Name -> title, training file in the seed's directory, overrides."""
CONFIGS = ("tiny.yaml", "ablation_tiny.yaml", "algorithms/grpo.yaml", "selection_tiny.yaml")
JUDGE = "selection/weak_judge.py"
SELECT = (
    "--samples", "8", "--hardest", str(KEPT), "reward.verifier=weak_judge:WeakJudge",
    "model.dtype=float32", "rollout.max_prompt_tokens=64", "rollout.max_response_tokens=192",
    "rollout.max_num_sequences=256", "rollout.kv_cache_bytes=67108864",
)  # fmt: skip
COLUMNS = ("accuracy", "cannot be hacked", "can be hacked", "as the weak judge sees it", "tokens")


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
        done = [job for job in jobs if job.out.name in ARMS and is_finished(job)]
        text = markdown({job.name: evaluations(job.out) for job in done})
        replace_file(root / "table.md", text)
        print(f"\n{text}\n{root / 'table.md'}")

    return command.Plan(root, jobs, write, modules=("selection",))


def seed_jobs(root: Path, seed: int, steps: int) -> list[Job]:
    """Return a seed's jobs, dependencies first.

    Args:
        root: directory of the example.
        seed: of models, problems and runs.
        steps: of each arm.
    """
    jobs = Seed(root, seed)
    out = jobs.out
    jobs.add_script("base", BASE_SOURCES, seconds=60.0)
    jobs.add_script("data", ("selection/problems.py", "task.py", JUDGE), seconds=0.5)
    jobs.add(
        "chosen", ("base", "data"), {"options": " ".join(SELECT)},
        "-m", "vapo_megatron", "select", "--checkpoint", out / "base",
        "--data", out / "data/pool.jsonl", "--out", out / "chosen/prompts.parquet",
        *SELECT, f"seed={seed}", sources=(JUDGE,),
    )  # fmt: skip
    for name, (_, problems, own) in ARMS.items():
        jobs.add_run(
            name, CONFIGS, f"seed={seed}", f"algorithm.policy_steps={steps}",
            f"model.hf_path={out / 'base'}", f"data.train_path={out / problems}",
            f"evaluation.path={out / 'data/test.jsonl'}", *own, sources=(JUDGE,), step_seconds=4.0,
            needs=("base", "data", *(["chosen"] if "chosen" in problems else [])),
        )  # fmt: skip
    return list(jobs.jobs.values())


def evaluations(run_dir: Path) -> tuple[list[float], list[float]]:
    """Return a run's cells under COLUMNS before the first step and after the last.

    The accuracy is of all held-out problems by the ground truth, weighted as they occur.
    """
    rows = [r for r in read_rows(run_dir / "metrics.jsonl") if accuracy_name(r)]
    file = run_dir.parent / "data/test.jsonl"
    count = collections.Counter(json.loads(line)["verifier"] for line in file.open())
    return _cells(rows[0], count), _cells(rows[-1], count)


def _cells(row: Mapping[str, Any], count: Mapping[str, int]) -> list[float]:
    average = str(accuracy_name(row)).removeprefix("evaluation/")
    rest, hackable, weak = (
        row[f"evaluation/by_verifier/{name}/{average}"]
        for name in ("rest", "hackable", "hackable_weak")
    )
    total = count["rest"] * rest + count["hackable"] * hackable
    tokens = row["evaluation/by_verifier/hackable/response_length_mean"]
    return [total / (count["rest"] + count["hackable"]), rest, hackable, weak, tokens]


def markdown(found: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> str:
    """Return the table: mean, standard deviation and each seed; found: of `seed_N/ARM`, by seed."""
    by_arm: dict[str, list[Sequence[float]]] = {"base": []}
    seeds = set()
    for name, (before, after) in found.items():
        seed, arm = name.split("/")
        if seed not in seeds:  # The arms of a seed start from one model.
            by_arm["base"].append(before)
        seeds.add(seed)
        by_arm.setdefault(arm, []).append(after)
    titles = {"base": "base model"} | {name: arm[0] for name, arm in ARMS.items()}
    rows = []
    for name, title in titles.items():
        columns = zip(*by_arm.get(name, []))
        cells = [_cell(values, ".0f" if i == 4 else ".3f") for i, values in enumerate(columns)]
        rows += [[title, *cells]] if cells else []
    return tables.markdown(["prompts", *COLUMNS], rows)


def _cell(values: Sequence[float], form: str) -> str:
    return f"{spread(values, form)} ({' '.join(format(value, form) for value in values)})"

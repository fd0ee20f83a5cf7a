"""Pre-PPO (arXiv 2503.22230) in miniature: selected against random prompts of the same number.

    python examples/tiny/selection.py [--seeds 0 1 2] [--steps 12]

The reward, weak_judge.py, can be hacked on a third of the problems. `vapo select --hardest` keeps
the prompts on which it scores the base model lowest. An arm trains on these, one on as many random
prompts, and one on the random prompts by the ground truth; they differ in nothing else. Ends with a
table of held-out accuracies. If interrupted, the same command resumes.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ablation_jobs import (  # noqa: E402
    FILES,
    TINY,
    Job,
    digest,
    effective,
    is_finished,
    require_unchanged,
)
from ablation_runner import locked, run_jobs  # noqa: E402
from ablation_table import spread  # noqa: E402
from selection_problems import KEPT  # noqa: E402

from vapo_megatron.cli.command import Parser, run  # noqa: E402
from vapo_megatron.config import load_config  # noqa: E402
from vapo_megatron.config.metrics import accuracy_name  # noqa: E402
from vapo_megatron.data.storage import replace_file  # noqa: E402
from vapo_megatron.errors import UserError  # noqa: E402
from vapo_megatron.run.directory import read_rows  # noqa: E402
from vapo_megatron.run.progress import format_seconds  # noqa: E402

ARMS = {
    "selected": ("selected", "chosen/prompts.parquet", ()),
    "random": ("random", "data/random.jsonl", ()),
    "truth": ("random, judged by the ground truth", "data/random.jsonl", ("reward.verifier=math",)),
}
"""Name -> title, training file in the seed's directory, overrides."""
CONFIGS = ("tiny.yaml", "ablation_tiny.yaml", "algorithms/grpo.yaml", "selection_tiny.yaml")
SELECT = (
    "--samples", "8", "--hardest", str(KEPT), "reward.verifier=weak_judge:WeakJudge",
    "model.dtype=float32", "rollout.max_prompt_tokens=64", "rollout.max_response_tokens=192",
    "rollout.max_num_sequences=256", "rollout.kv_cache_bytes=67108864",
)  # fmt: skip
COLUMNS = ("accuracy", "cannot be hacked", "can be hacked", "as the weak judge sees it", "tokens")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs and write the table; return 1 if a job failed."""
    parser = Parser(prog="run_selection_tiny.sh", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="seeds (0 1 2)"
    )
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="of an arm (12)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="concurrent jobs (2)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/selection_tiny"), metavar="DIR",
        help="output directory (runs/selection_tiny)",
    )  # fmt: skip
    parser.add_argument("--rerun", action="store_true", help="redo what other settings have made")
    # Closing the terminal sends SIGHUP, which nohup ignores.
    ending = [signal.SIGINT, signal.SIGTERM]
    ending += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return run(
        "selection", lambda: _selection(parser.parse_args(arguments)),
        interrupted="run the same command to resume", signals=ending,
    )  # fmt: skip


def _selection(args: argparse.Namespace) -> int:
    if min(args.jobs, args.steps) < 1 or min(args.seeds) < 0:
        given = f"--jobs {args.jobs} and --steps {args.steps}"
        raise UserError(f"{given} must be at least 1, and --seeds at least 0; change them")
    started, root = time.monotonic(), args.out.resolve()
    jobs = [job for seed in sorted(set(args.seeds)) for job in seed_jobs(root, seed, args.steps)]
    path = [str(ROOT), str(TINY), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with locked(root) as lock:
        require_unchanged(jobs, rerun=args.rerun)
        failures = run_jobs(
            jobs, slots=args.jobs, lock=lock, environment={**os.environ, **own}, cwd=ROOT,
            say=lambda line: print(line, flush=True),
        )  # fmt: skip
        text = markdown({job.name: evaluations(job.out) for job in jobs if _is_done_arm(job)})
        replace_file(root / "table.md", text)
    print(f"\n{text}\n{root / 'table.md'}")
    print(f"{format_seconds(time.monotonic() - started)} in this invocation")
    for name, why in failures.items():
        print(f"{name}: {why}", file=sys.stderr)
    return 1 if failures else 0


def _is_done_arm(job: Job) -> bool:
    return job.out.name in ARMS and job.num_steps > 0 and is_finished(job)


def seed_jobs(root: Path, seed: int, steps: int) -> list[Job]:
    """Return a seed's jobs, dependencies first.

    Args:
        root: directory of the example.
        seed: of models, problems and runs.
        steps: of each arm.
    """
    out, jobs = root / f"seed_{seed}", dict[str, Job]()

    def add(
        name: str, needs: Sequence[str], settings: Mapping[str, Any], sources: Sequence[str],
        *command: object, **rest: Any,
    ) -> None:  # fmt: skip
        found = dict(settings)
        found |= {s: hashlib.sha256((TINY / s).read_bytes()).hexdigest()[:12] for s in sources}
        found |= {f"made from {need}": digest(jobs[need].settings) for need in needs}
        jobs[name] = Job(
            f"{out.name}/{name}", out / name, (sys.executable, *map(str, command)), found,
            tuple(f"{out.name}/{need}" for need in needs), **rest,
        )  # fmt: skip

    for name, *sources in (
        ("base", "make_base_model.py", "make_tokenizer.py", "making.py", "skill.py", "task.py"),
        ("data", "selection_problems.py", "task.py", "weak_judge.py"),
    ):
        add(
            name, (), {}, sources, TINY / sources[0], "--out", out / name, "--seed", seed,
            estimate_seconds=60.0 if name == "base" else 0.5,
        )  # fmt: skip
    add(
        "chosen", ("base", "data"), {"options": " ".join(SELECT)}, ("weak_judge.py",),
        "-m", "vapo_megatron", "select", "--checkpoint", out / "base",
        "--data", out / "data/pool.jsonl", "--out", out / "chosen/prompts.parquet",
        *SELECT, f"seed={seed}",
    )  # fmt: skip
    files = [FILES / name for name in CONFIGS]
    options = [part for file in files for part in ("--config", file)]
    for name, (_, problems, own) in ARMS.items():
        overrides = (
            f"seed={seed}", f"algorithm.policy_steps={steps}",
            f"model.hf_path={out / 'base'}", f"data.train_path={out / problems}",
            f"evaluation.path={out / 'data/test.jsonl'}", f"logging.run_dir={out / name}", *own,
        )  # fmt: skip
        config = load_config(files, overrides)
        add(
            name, ("base", "data", *(["chosen"] if "chosen" in problems else [])),
            effective(config, out), ("weak_judge.py",),
            "-m", "vapo_megatron.train", *options, *overrides,
            num_steps=steps, estimate_seconds=20.0 + 4.0 * steps,
        )  # fmt: skip
    return list(jobs.values())


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
    lines = ["| prompts | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (1 + len(COLUMNS))]
    for name, title in titles.items():
        columns = zip(*by_arm.get(name, []))
        cells = [_cell(values, ".0f" if i == 4 else ".3f") for i, values in enumerate(columns)]
        lines += [f"| {title} | {' | '.join(cells)} |"] if cells else []
    return "\n".join(lines) + "\n"


def _cell(values: Sequence[float], form: str) -> str:
    return f"{spread(values, form)} ({' '.join(format(value, form) for value in values)})"


if __name__ == "__main__":
    sys.exit(main())

"""TRL's GRPO beside GRPO and VAPO here: seconds a step, memory, and accuracy after equal responses.

The same model, scorer, batch, loss, learning rate and lengths, and the same prompts in the same
order: after a few steps what was learned depends more on them than on anything else. One process
with one thread on each side, in turns, so that both meet the same machine. A step is one batch of
sampled responses and the updates on it. TRL samples with transformers, as it does on a CPU; its
activations are kept (its default computes them twice). run_vapo_smollm.sh makes model and prompts.
Interrupted, the same command goes on.

    pip install -e '.[trl]'
    python examples/smollm/compare_trl.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pyarrow
import pyarrow.parquet
import yaml

from vapo_megatron.config import load_config
from vapo_megatron.data.storage import replace_file

HERE = Path(__file__).parent
CONFIG = HERE.parent / "configs/smollm.yaml"
ONE_PROCESS = (
    "parallel.world_size=1", "parallel.pipeline_model_parallel_size=1",
    # TRL's microbatches are of 24 responses, about 4,000 tokens.
    "parallel.max_tokens_per_microbatch=2048",
    "checkpoint.every_steps=0", "logging.rollout_groups=0",
)  # fmt: skip
PARTS = ("generation", "scoring", "update")
LOOK_SECONDS = 1.0


class Side(NamedTuple):
    """What is compared."""

    title: str
    recipe: str
    """Of this package; empty: TRL."""
    settings: tuple[str, ...] = ()


SIDES = {
    "grpo": Side("GRPO here", "grpo"),
    # Its default, dapo, weighs tokens where GRPO's loss weighs responses.
    "trl": Side("TRL's GRPO", "", ("--loss", "grpo")),
    # A value pretraining of its own would be steps that TRL has no counterpart of.
    "vapo": Side("VAPO here", "vapo", ("algorithm.value_pretraining_steps=0",)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, print the table; return the exit code."""
    options = _parser().parse_args(argv)
    missing = [path for path in (options.model, options.data) if not path.exists()]
    if missing:
        print(f"{missing[0]} is missing; bash examples/run_vapo_smollm.sh --dry-run makes it")
        return 2
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for seed in range(options.rounds):
        for name, side in SIDES.items():
            out = options.out / f"{name}_{seed}"
            found = out / "result.json"
            if not found.exists():
                print(f"{side.title}, seed {seed} ...", flush=True)
                shutil.rmtree(out, ignore_errors=True)
                replace_file(found, json.dumps(_measured(side, out, seed, options)))
            runs[name].append(json.loads(found.read_text()))
    text = table(runs)
    replace_file(options.out / "table.md", text)
    print(text)
    return 0


def table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the comparison, in Markdown; runs: of each of SIDES, by seed."""
    lines = [
        "| | seconds a step | of TRL's | sampling | scoring | update | memory | accuracy |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, results in runs.items():
        seconds = [_median(r["steps"], "seconds") for r in results]
        others = [_median(r["steps"], "seconds") for r in runs["trl"]]
        ratio = statistics.mean(a / b for a, b in zip(seconds, others, strict=True))
        parts = [statistics.mean(_median(r["steps"], part) for r in results) for part in PARTS]
        memory = max(r["peak_bytes"] for r in results) / 1e9
        accuracy = ", ".join(f"{r['accuracy']:.3f}" for r in results)
        cells = [
            SIDES[name].title, f"{statistics.mean(seconds):.1f}", f"{ratio:.2f}",
            *[f"{part:.1f}" for part in parts], f"{memory:.1f} GB", accuracy,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _median(steps: Sequence[Mapping[str, float]], part: str) -> float:
    """Of the steps after the first, which loads and compiles."""
    return statistics.median(step[part] for step in steps[1:])


def _measured(side: Side, out: Path, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    sources = sorted(options.data.glob("*.test.parquet"))
    trained = [p.with_name(p.name.replace(".test", "")) for p in sources]
    pairs = [(a, b) for a, b in zip(sources, trained, strict=True) if b.exists()]
    prompts = options.out / f"prompts_{seed}.parquet"
    write_prompts(prompts, [b for _, b in pairs], seed, options.steps)
    run = _ours if side.recipe else _trl
    steps, peak = run(side, out, seed, prompts, options)
    held_out = [a for a, _ in pairs]
    accuracy = _accuracy(out / ("hf_export" if side.recipe else "model"), out, held_out)
    return {"steps": steps, "peak_bytes": peak, "accuracy": accuracy}


def write_prompts(path: Path, tasks: Sequence[Path], seed: int, steps: int) -> None:
    """Write the prompts of a run in their order: of each task in turn, as the seed shuffles it."""
    draw, rows = random.Random(seed), []
    for task in tasks:
        of_task = pyarrow.parquet.read_table(task).to_pylist()
        rows.append(itertools.cycle(draw.sample(of_task, len(of_task))))
    count = steps * load_config([CONFIG], []).algorithm.num_prompts
    path.parent.mkdir(parents=True, exist_ok=True)
    chosen = list(itertools.islice(itertools.chain.from_iterable(zip(*rows)), count))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chosen), path)


def _ours(
    side: Side, out: Path, seed: int, prompts: Path, options: argparse.Namespace
) -> tuple[list[dict[str, float]], int]:
    # Both sides are evaluated after their end, by the same command.
    tree = yaml.safe_load(CONFIG.read_text())
    del tree["evaluation"]
    tree["data"] = {"train_path": str(prompts), "shuffle": False}
    config = out.with_suffix(".yaml")
    config.parent.mkdir(parents=True, exist_ok=True)
    replace_file(config, yaml.safe_dump(tree))
    command = [
        sys.executable, "-m", "vapo_megatron", "train",
        "--config", str(config), "--config", side.recipe,
        f"seed={seed}", f"logging.run_dir={out}", f"model.hf_path={options.model}",
        f"algorithm.policy_steps={options.steps}", "checkpoint.hf_export=true",
        *ONE_PROCESS, *side.settings,
    ]  # fmt: skip
    peak = _watched(command, out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [_our_step(row) for row in rows if "time/generation_seconds" in row], peak


def _our_step(row: Mapping[str, float]) -> dict[str, float]:
    seconds, sampling = row["time/step_seconds"], row["time/generation_seconds"]
    scoring = row["time/reward_seconds"]
    return {
        "seconds": seconds, "generation": sampling, "scoring": scoring,
        "update": seconds - sampling - scoring, "reward": row["reward/mean"],
    }  # fmt: skip


def _trl(
    side: Side, out: Path, seed: int, prompts: Path, options: argparse.Namespace
) -> tuple[list[dict[str, float]], int]:
    config = load_config([CONFIG], [])
    algorithm = config.algorithm
    command = [
        sys.executable, str(HERE / "trl_grpo.py"),
        "--model", str(options.model), "--data", str(prompts), "--out", str(out),
        "--steps", str(options.steps), "--seed", str(seed),
        "--responses", str(algorithm.responses_per_step), "--group", str(algorithm.group_size),
        "--mini-batch", str(algorithm.mini_batch_size),
        "--micro-batch", str(algorithm.mini_batch_size),
        "--max-response-tokens", str(config.rollout.max_response_tokens),
        "--learning-rate", str(config.optimizer.actor_learning_rate),
        "--adam-beta2", str(config.optimizer.adam_beta2), *side.settings,
    ]  # fmt: skip
    peak = _watched(command, out)
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()], peak


def _watched(command: Sequence[str], out: Path) -> int:
    """Run a command to its end -> the most memory that it and its children had together, in bytes.

    Raises SystemExit where it fails, with its last lines.
    """
    out.mkdir(parents=True, exist_ok=True)
    root = str(HERE.parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path,
    }  # fmt: skip
    log = out / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        peak, watched = 0, psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, _memory([watched, *_children(watched)]))
            time.sleep(LOOK_SECONDS)
    if process.returncode:
        last = "\n".join(log.read_text().splitlines()[-15:])
        raise SystemExit(f"{' '.join(command[:4])} ended with code {process.returncode}:\n{last}")
    return peak


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _memory(processes: Iterable[psutil.Process]) -> int:
    """Proportional set size: shared pages count once."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def _accuracy(model: Path, out: Path, tasks: Sequence[Path]) -> float:
    """Return the mean accuracy over the held-out problems of the trained tasks."""
    means = []
    for held_out in tasks:
        found = out / f"{held_out.stem}.jsonl"
        command = [
            sys.executable, "-m", "vapo_megatron", "evaluate", "--checkpoint", str(model),
            "--data", str(held_out), "--out", str(found), "--samples", "2", "--temperature", "1.0",
            "--top-p", "1.0", "model.dtype=float32", "reward.verifier=reasoning_gym",
            "reward.num_workers=1", "rollout.max_response_tokens=24",
            "rollout.kv_cache_bytes=268435456", "rollout.max_num_sequences=64",
        ]  # fmt: skip
        _watched(command, out / "evaluation")
        samples = [json.loads(line) for line in found.read_text().splitlines()]
        responses = [r for row in samples for r in row.get("responses", [])]
        means.append(sum(r["status"] == "correct" for r in responses) / len(responses))
    return statistics.mean(means)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made = Path("runs/smollm")
    parser.add_argument("--model", type=Path, default=made / "model")
    parser.add_argument("--data", type=Path, default=made / "data", help="directory of prompts")
    parser.add_argument("--out", type=Path, default=made / "trl")
    parser.add_argument("--steps", type=int, default=6, help="of each run (default 6)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side (default 2)")
    return parser


if __name__ == "__main__":
    sys.exit(main())

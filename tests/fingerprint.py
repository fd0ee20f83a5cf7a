#!/usr/bin/env python3
"""Fingerprint of everything that a checkout computes: equal output means bit-identical results.

python tests/fingerprint.py [--checkout DIR] > before.txt
python tests/fingerprint.py [--checkout DIR] > after.txt; diff before.txt after.txt

Runs the commands that people use, as a user would: the tiny run with seed 0, three steps of each
recipe, a run resumed from its middle, an evaluation, and a conversion there and back. Prints one
SHA-256 for each result: metrics without times and memory, each role's checkpointed tensors,
exports, samples and rollouts. About 12 minutes on 2 cores. Results are comparable on one machine
alone, since another processor rounds differently.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

VARYING = ("time/", "tokens_per_second", "memory/")
"""Metrics that two runs of the same thing do not share."""
SKIPPED = ("log.txt", "report.html", "checksums.json", ".lock", "config.yaml", "latest")
RECIPES = ("vapo", "ppo", "vc_ppo", "grpo", "dr_grpo", "dapo", "orz")
SMALL = (
    "algorithm.responses_per_step=64",
    "algorithm.mini_batch_size=32",
    "evaluation.samples=1",
    "logging.tensorboard=false",
    "logging.dump_steps=9",
)


def main() -> int:
    """Run everything in the checkout and print a line for each result."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--checkout", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--made", action="store_true", help="results are there: hash them alone")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    os.chdir(checkout)
    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(checkout), VAPO_PYTHON=sys.executable)
    if not options.made:
        shutil.rmtree("runs/fingerprint", ignore_errors=True)
        shutil.rmtree("runs/tiny/seed_0", ignore_errors=True)
        make_results()
    for name, digest in results():
        print(digest[:32], name, flush=True)
    return 0


def make_results() -> None:
    """Run each command; all paths are relative, so that files that name them are equal too."""
    run("bash", "examples/run_vapo_tiny.sh", "--seed", "0")
    for recipe in RECIPES:
        steps = ("algorithm.value_pretraining_steps=1", "algorithm.policy_steps=2")
        if recipe not in ("vapo", "vc_ppo"):
            steps = ("algorithm.value_pretraining_steps=0", "algorithm.policy_steps=3")
        size = 1 if recipe.endswith("ppo") else 8
        train(recipe, recipe, *steps, f"algorithm.group_size={size}")
    resumed = ("algorithm.value_pretraining_steps=2", "algorithm.policy_steps=4")
    train("vapo", "straight", *resumed, "checkpoint.every_steps=3", "checkpoint.keep_last=9")
    shutil.copytree("runs/fingerprint/straight", "runs/fingerprint/resumed")
    checkpoints = Path("runs/fingerprint/resumed/checkpoints")
    (checkpoints / "latest").write_text("step_000003")
    shutil.rmtree(checkpoints / "step_000006")
    train("vapo", "resumed", *resumed, "checkpoint.every_steps=3", "checkpoint.keep_last=9")
    python(
        "-m", "vapo_megatron", "evaluate", "--checkpoint", "runs/tiny/seed_0/vapo",
        "--data", "runs/tiny/seed_0/data/test.jsonl", "--samples", "2",
        "--out", "runs/fingerprint/evaluation/samples.jsonl",
    )  # fmt: skip
    export, there = "runs/tiny/seed_0/vapo/hf_export", "runs/fingerprint/megatron"
    layout = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    python("tools/convert_hf_to_megatron.py", "--hf", export, "--out", there, *layout)
    back = "runs/fingerprint/back"
    python("tools/convert_megatron_to_hf.py", "--megatron", there, "--out", back)


def train(recipe: str, name: str, *overrides: str) -> None:
    """Train with two processes over the tiny configuration; the tiny run's base model and data."""
    configs = ("examples/configs/tiny.yaml", f"examples/configs/algorithms/{recipe}.yaml")
    python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "vapo_megatron.train", *(part for c in configs for part in ("--config", c)),
        *SMALL, *overrides, f"logging.run_dir=runs/fingerprint/{name}",
    )  # fmt: skip


def python(*arguments: str) -> None:
    """Run this interpreter."""
    run(sys.executable, *arguments)


def run(*command: str) -> None:
    """Run a command, or end with what it said."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def results() -> Iterator[tuple[str, str]]:
    """Yield (name, SHA-256) of each result."""
    for root in (Path("runs/tiny/seed_0"), Path("runs/fingerprint")):
        for path in sorted(p for p in root.rglob("*") if p.is_file()):
            if (path.parent / ".metadata").exists() or path.name.startswith("rng_"):
                continue  # Tensors are read below; a file's own bytes may depend on its writer.
            if path.name in SKIPPED or "tensorboard" in path.parts or path.suffix == ".lock":
                continue
            yield str(path), digest_of_file(path)
        for path in sorted(root.rglob(".metadata")):
            yield str(path.parent), digest_of_tensors(path.parent)


def digest_of_file(path: Path) -> str:
    """Hash a file; of metrics, and of the row that a checkpoint may keep, what does not vary."""
    if path.name in ("metrics.jsonl", "state.json"):
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        rows = [fixed(json.loads(line)) for line in lines]
        return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    if path.suffix == ".safetensors":
        return digest_of_safetensors(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_of_safetensors(path: Path) -> str:
    """Hash tensors and metadata, whose order in the file is random."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    total = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    total.update(data[8 + size :])
    return total.hexdigest()


def fixed(tree: object) -> object:
    """Drop times and memory, however deep."""
    if isinstance(tree, dict):
        return {k: fixed(v) for k, v in tree.items() if not k.startswith(VARYING)}
    return [fixed(item) for item in tree] if isinstance(tree, list) else tree


def digest_of_tensors(directory: Path) -> str:
    """Hash every tensor of a distributed checkpoint, read in full by torch itself."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tensors: dict[str, object] = {}
    reader, planner = FileSystemReader(directory), _EmptyStateDictLoadPlanner()
    _load_state_dict(tensors, storage_reader=reader, planner=planner, no_dist=True)
    total = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        if torch.is_tensor(value):
            total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            total.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    sys.exit(main())

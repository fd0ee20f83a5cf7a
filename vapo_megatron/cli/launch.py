"""How training starts: check everything in one process, then become torchrun.

`vapo train` and the recipes share this path. Under torchrun the same command is one of its workers.

A launch sets OMP_NUM_THREADS=1: one process per GPU, so more threads in each only compete. What
CUDA and NCCL read is set by every process, however it was started (parallel/environment.py).
PYTORCH_ALLOC_CONF is left alone: vLLM's custom all-reduce cannot share expandable segments between
ranks, and crashes when it captures CUDA graphs (vllm-project/vllm, issue 42609).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vapo_megatron.parallel.health import early_stop


def main(argv: Sequence[str] | None = None) -> int:
    """`vapo train`: check and start torchrun, or train as one of torchrun's workers."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _train(arguments, ["-m", "vapo_megatron.train", *arguments], "vapo train")


def run_recipe(script: str, configs: Sequence[str], arguments: Sequence[str]) -> int:
    """Train with a recipe's configuration files.

    Args:
        script: the recipe's path, which torchrun runs as its worker.
        configs: file names in configs/ beside the recipe; later ones win, and --config files and
            overrides on the command line win over them.
        arguments: of the command line.

    Returns:
        The exit code: 0, or 2 for a user's mistake. Without torchrun the process becomes torchrun,
        whose exit code it then is.
    """
    files = [str(Path(script).resolve().parent / "configs" / name) for name in configs]
    options = [part for file in files for part in ("--config", file)]
    return _train([*options, *arguments], [script, *arguments], Path(script).name)


def _train(arguments: Sequence[str], worker: Sequence[str], program: str) -> int:
    early_stop.end_on_interrupt("error: interrupted; nothing was started")
    try:
        from vapo_megatron.cli.train import main as train
    except ModuleNotFoundError as missing:
        print(
            f"error: {sys.executable} has no module {missing.name!r}; activate the environment "
            "that has the package's requirements, or set VAPO_PYTHON to its interpreter",
            file=sys.stderr,
        )
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    early_stop.block_signals(early_stop.SCHEDULERS)
    # Not RANK: some clusters set it for nodes.
    under_torchrun = "LOCAL_RANK" in os.environ
    return train(arguments, program=program, worker=None if under_torchrun else worker)

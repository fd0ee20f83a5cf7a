"""How training starts: check everything in one process, then become torchrun.

`vapo train` and the recipes share this path. Under torchrun the same command is one of its workers.
A user's mistake is found before torchrun starts, so it is one line without torchrun's report.

A launch sets OMP_NUM_THREADS=1: one process per GPU, so more threads in each only compete. What
CUDA and NCCL read is set by every process, however it was started (parallel/environment.py).
PYTORCH_ALLOC_CONF is left alone: vLLM's custom all-reduce cannot share expandable segments between
ranks, and crashes when it captures CUDA graphs (vllm-project/vllm, issue 42609).
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from vapo_megatron.errors import ConfigError
from vapo_megatron.parallel.health import early_stop

GPUS_PER_NODE = 8


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
    early_stop.block_signals()
    # Not RANK: some clusters set it for nodes.
    under_torchrun = "LOCAL_RANK" in os.environ
    return train(arguments, program=program, worker=None if under_torchrun else worker)


def torchrun_command(
    environment: Mapping[str, str],
    world_size: int,
    worker: Sequence[str],
    num_samplers: int = 0,
) -> list[str]:
    """Return the torchrun command line that the usual cluster variables describe.

    Args:
        environment: NNODES (default 1); NPROC_PER_NODE (default: the processes of this node, at
            most 8); with several nodes NODE_RANK and MASTER_ADDR; MASTER_PORT (default: 29500, on
            one node a free one); MAX_RESTARTS (default 0), how often torchrun restarts the
            processes after a failure.
        world_size: number of processes on all nodes.
        worker: script or `-m module`, and its arguments.
        num_samplers: how many of them are rollout.num_processes.

    Raises:
        ConfigError: a variable is missing or not a number, or their product is not world_size.
    """
    num_nodes = _number(environment, "NNODES", 1, least=1)
    per_node = _number(environment, "NPROC_PER_NODE", min(GPUS_PER_NODE, world_size), least=1)
    if num_nodes * per_node != world_size:
        sampling = f" + rollout.num_processes={num_samplers}" if num_samplers else ""
        raise ConfigError(
            f"parallel.world_size={world_size - num_samplers}{sampling} must be "
            f"NNODES({num_nodes}) * NPROC_PER_NODE({per_node}) = {num_nodes * per_node}; set the "
            f"variables, or parallel.world_size={num_nodes * per_node - num_samplers} with a "
            "layout that fits it"
        )
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if not environment.get(name)]
    if num_nodes > 1 and missing:
        raise ConfigError(
            f"NNODES={num_nodes} needs {' and '.join(missing)}: set NODE_RANK to 0, 1, ... on each "
            "node and MASTER_ADDR to the first node's address on all, or start torchrun yourself"
        )
    node_rank = _number(environment, "NODE_RANK", 0, least=0)
    if node_rank >= num_nodes:
        raise ConfigError(
            f"NODE_RANK={node_rank} must be less than NNODES={num_nodes}; nodes count from 0"
        )
    port = 29500 if num_nodes > 1 else _free_port()
    module_flag = ["-m"] if worker[0] == "-m" else []
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={num_nodes}",
        f"--node-rank={node_rank}",
        f"--master-addr={environment.get('MASTER_ADDR') or '127.0.0.1'}",
        f"--master-port={_number(environment, 'MASTER_PORT', port, least=1)}",
        f"--nproc-per-node={per_node}",
        f"--max-restarts={_number(environment, 'MAX_RESTARTS', 0, least=0)}",
        *module_flag,
        # Without it torchrun refuses a worker's option that is short for several of its own.
        "--",
        *worker[len(module_flag) :],
    ]


def execute(command: Sequence[str]) -> NoReturn:
    """Replace this process by a command."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], list(command))


def _number(environment: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(
            f"{name}={text} must be a whole number of at least {least}; for ranges, restarts and "
            "other rendezvous start torchrun yourself"
        )
    return int(text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]

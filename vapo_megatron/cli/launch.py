"""Starts a recipe: under torchrun it trains; started plainly, it becomes torchrun on itself.

Loads neither torch nor megatron-core, so that a mistake is told in one line at once, on the node
that has it.

ENVIRONMENT is all that a recipe exports. CUDA_DEVICE_MAX_CONNECTIONS=1 is set by every process that
loads megatron-core, whatever started it (parallel/backend.py). NCCL_* are the cluster's: no value
is right for all. PYTORCH_ALLOC_CONF is left alone on purpose: vLLM's own all-reduce cannot share
memory of expandable segments between a replica's ranks, and dies of it when it captures CUDA graphs
(vllm-project/vllm, issue 42609).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vapo_megatron.parallel.health import early_stop

if TYPE_CHECKING:
    from vapo_megatron.config import VapoConfig

ENVIRONMENT = {
    # One process per GPU: more threads in each only get into each other's way.
    "OMP_NUM_THREADS": "1",
}

GPUS_PER_NODE = 8


def run_recipe(script: str, configs: Sequence[str], arguments: Sequence[str]) -> int:
    """Train with a recipe's configuration files.

    Args:
        script: the recipe's path, which torchrun runs on every process.
        configs: names of files in configs/ beside the recipe; later ones win, and further --config
            files and overrides on the command line win over them.
        arguments: the command line's.

    Returns:
        The exit code: 0, or 2 for a user's mistake. Without torchrun around it, the process becomes
        torchrun once the configuration has been checked; the exit code is then torchrun's.
    """
    try:
        from vapo_megatron.cli.train import main
    except ModuleNotFoundError as missing:
        print(
            f"error: {sys.executable} has no module {missing.name!r}; activate the environment "
            "that has the package's requirements, or set VAPO_PYTHON to its interpreter",
            file=sys.stderr,
        )
        return 2

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    early_stop.block_signals()

    files = [str(Path(script).resolve().parent / "configs" / name) for name in configs]
    options = [part for file in files for part in ("--config", file)]

    def start(config: VapoConfig) -> None:
        command = torchrun_command(os.environ, config.parallel.world_size, script, arguments)
        os.execv(command[0], command)

    # Not RANK: some clusters give it to nodes.
    under_torchrun = "LOCAL_RANK" in os.environ
    return main(
        [*options, *arguments], None if under_torchrun else start, program=Path(script).name
    )


def torchrun_command(
    environment: Mapping[str, str], world_size: int, script: str, arguments: Sequence[str]
) -> list[str]:
    """Return the torchrun command line that the usual cluster variables describe.

    Args:
        environment: NNODES (default 1), NPROC_PER_NODE (8, or parallel.world_size where that is
            less), and of several nodes NODE_RANK and MASTER_ADDR; MASTER_PORT (29500); MAX_RESTARTS
            (0), how often torchrun starts the processes anew after a failure.
        world_size: parallel.world_size.
        script: what torchrun starts.
        arguments: what it is given.

    Raises:
        ConfigError: a variable is missing or no number, or they start another number of processes.
    """
    from vapo_megatron.errors import ConfigError

    num_nodes = _number(environment, "NNODES", 1, least=1)
    per_node = _number(environment, "NPROC_PER_NODE", min(GPUS_PER_NODE, world_size), least=1)
    if num_nodes * per_node != world_size:
        raise ConfigError(
            f"parallel.world_size={world_size} must be NNODES({num_nodes}) * "
            f"NPROC_PER_NODE({per_node}) = {num_nodes * per_node}; set the variables, or "
            f"parallel.world_size={num_nodes * per_node} with a layout that fits it"
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
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={num_nodes}",
        f"--node-rank={node_rank}",
        f"--master-addr={environment.get('MASTER_ADDR') or '127.0.0.1'}",
        f"--master-port={_number(environment, 'MASTER_PORT', 29500, least=1)}",
        f"--nproc-per-node={per_node}",
        f"--max-restarts={_number(environment, 'MAX_RESTARTS', 0, least=0)}",
        script,
        *arguments,
    ]


def _number(environment: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    from vapo_megatron.errors import ConfigError

    text = environment.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(
            f"{name}={text} must be a whole number of at least {least}; for ranges, restarts and "
            "other rendezvous start torchrun yourself"
        )
    return int(text)

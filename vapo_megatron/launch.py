"""Starts a recipe: under torchrun it trains; started plainly, it calls torchrun on itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vapo_megatron.config import VapoConfig
from vapo_megatron.train import main


def run_recipe(config: Path, script: str, arguments: Sequence[str]) -> int:
    """Train with a recipe's configuration file.

    Args:
        config: the recipe's YAML file; further --config files and overrides win over it.
        script: the recipe, which torchrun runs on every process.
        arguments: the command line's.

    Returns:
        The exit code. Without torchrun around it, the process becomes torchrun once the
        configuration has been checked.
    """
    start = None
    if "RANK" not in os.environ:

        def start(_: VapoConfig) -> None:
            command = torchrun_command(os.environ, script, arguments)
            os.execv(command[0], command)

    return main(["--config", str(config), *arguments], start)


def torchrun_command(
    environment: Mapping[str, str], script: str, arguments: Sequence[str]
) -> list[str]:
    """Return the torchrun command line that the usual cluster variables describe.

    NNODES (default 1), NODE_RANK (0), MASTER_ADDR (127.0.0.1), MASTER_PORT (29500) and
    NPROC_PER_NODE (8).
    """
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={environment.get('NNODES', '1')}",
        f"--node-rank={environment.get('NODE_RANK', '0')}",
        f"--master-addr={environment.get('MASTER_ADDR', '127.0.0.1')}",
        f"--master-port={environment.get('MASTER_PORT', '29500')}",
        f"--nproc-per-node={environment.get('NPROC_PER_NODE', '8')}",
        script,
        *arguments,
    ]

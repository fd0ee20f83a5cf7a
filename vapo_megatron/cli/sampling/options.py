"""The command line of what samples from a checkpoint; loads no torch."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vapo_megatron.cli.command import Parser, run, under_torchrun
from vapo_megatron.cli.torchrun import execute, torchrun_command
from vapo_megatron.errors import ConfigError


def main_of(
    command: str,
    parser: Parser,
    work: Callable[[argparse.Namespace, Sequence[str]], object],
    argv: Sequence[str] | None,
    *,
    interrupted: str = "the same command resumes from here",
) -> int:
    """Run a command; return its exit code.

    Args:
        command: of `vapo`.
        parser: of its options.
        work: given the options, and what torchrun runs on every process.
        argv: command line; None: this process's.
        interrupted: see command.run.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)

    def done() -> object:
        options = parser.parse_intermixed_args(arguments)
        for name in ("nproc", "batch", "samples", "problems"):
            value = getattr(options, name, None)
            if value is not None and value < 1:
                raise ConfigError(f"--{name}={value} must be at least 1")
        # The checkpoint is local, so do not ask the hub; read when transformers is loaded.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        return work(options, ["-m", "vapo_megatron", command, *arguments])

    # torchrun ends workers with SIGTERM: they have nothing to report or clean up.
    return run(command, done, interrupted=interrupted, signals=[signal.SIGINT])


def sampling_overrides(options: argparse.Namespace) -> list[str]:
    """Return the overrides of a command line, and what its flags set, as overrides."""
    names = ("samples", "temperature", "top_p", "top_k")
    given = {name: getattr(options, name) for name in names}
    flags = [f"evaluation.{name}={value}" for name, value in given.items() if value is not None]
    return [*options.overrides, *flags]


def num_processes(nproc: int | None) -> int | None:
    """Return the processes on all nodes: torchrun's, else --nproc."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else nproc


def become_torchrun(world_size: int, worker: Sequence[str]) -> NoReturn:
    """Start this command on as many processes of this machine."""
    # Variables of a cluster's training job, such as NNODES, are not an evaluation's.
    processes = {"NPROC_PER_NODE": str(world_size)}
    execute(torchrun_command(processes, world_size, worker))


def add_checkpoint(group: argparse._ArgumentGroup) -> None:
    """Add --checkpoint."""
    group.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="HF or run directory"
    )


def add_sampling(parser: Parser, **defaults: Any) -> None:
    """Add how responses are sampled, and the overrides.

    Args:
        parser: of the command.
        defaults: of samples, temperature, top_p and top_k; one that is not given is the run's.
    """
    sampling = parser.add_argument_group("sampling")
    of_directory = {"samples": 32, "temperature": 1.0, "top_p": 0.7, "top_k": "-1, off"}
    kinds = {"samples": (int, "K"), "temperature": (float, "T"), "top_p": (float, "P")}
    kinds["top_k"] = (int, "K")
    for name, (kind, metavar) in kinds.items():
        value = defaults.get(name)
        told = f"the run's; of an HF directory {of_directory[name]}" if value is None else value
        sampling.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar=metavar, default=value,
            help=f"{'per problem ' if name == 'samples' else ''}(default: {told})",
        )  # fmt: skip
    sampling.add_argument(
        "overrides", nargs="*", metavar="section.field=value",
        help="fields of training that concern sampling, such as rollout.max_response_tokens=8192 "
        "rollout.tensor_model_parallel_size=4 rollout.gpu_memory_utilization=0.9 "
        "model.dtype=float32 seed=1",
    )  # fmt: skip


def add_processes(parser: Parser) -> None:
    """Add --nproc and --batch."""
    processes = parser.add_argument_group("processes")
    processes.add_argument(
        "--nproc", type=int, metavar="N",
        help="on this machine (default: rollout.tensor_model_parallel_size, for one replica)",
    )  # fmt: skip
    processes.add_argument(
        "--batch", type=int, metavar="N",
        help="problems sampled together and then written (default: two responses per sequence "
        "that the replicas sample at once)",
    )  # fmt: skip

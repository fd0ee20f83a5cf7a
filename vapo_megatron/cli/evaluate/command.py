"""Evaluate a checkpoint: avg@k, pass@k, majority@k, length and truncation, with 95% intervals.

  vapo evaluate --checkpoint DIR --data test.parquet --samples 32
  vapo evaluate --checkpoint RUN --data test.parquet --nproc 8 seed=1
  torchrun --nproc-per-node 8 -m vapo_megatron evaluate ...      on several nodes

The checkpoint is a Hugging Face directory, or a run directory, which brings its hf_export and its
configuration; vapo convert to-hf makes one of a checkpoints/step_* directory. Lengths that are not
set are limited by the longest prompt of the data and the positions of the model. Every sample goes
to --out, a JSONL file; an interrupted evaluation resumes with the problems that are missing there.
rollout.tensor_model_parallel_size processes hold one vLLM replica, and the replicas of --nproc
processes share the problems.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vapo_megatron.cli.command import Parser, run, under_torchrun
from vapo_megatron.cli.torchrun import execute, torchrun_command
from vapo_megatron.errors import ConfigError

if TYPE_CHECKING:
    from vapo_megatron.rollout.evaluation.statistics import Estimate

_DEFAULT = "default: the run's; of an HF directory"


def main(
    argv: Sequence[str] | None = None,
    worker: Sequence[str] = ("-m", "vapo_megatron", "evaluate"),
) -> int:
    """Return 0; 2 for a user's mistake; 130 when interrupted.

    Args:
        argv: command line; None: this process's.
        worker: what torchrun runs on every process, before the command line.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)

    def work() -> Path | None:
        options = _parser().parse_intermixed_args(arguments)
        return _evaluate(options, [*worker, *arguments])

    return run(
        "evaluate",
        work,
        interrupted="the same command resumes from here",
        # torchrun ends workers with SIGTERM: they have nothing to report or clean up.
        signals=[signal.SIGINT],
    )


def _evaluate(options: argparse.Namespace, worker: Sequence[str]) -> Path | None:
    check_batch(options.batch)
    # The checkpoint is local, so do not ask the hub; read when transformers is loaded.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # These load torch, so they come after the options are checked.
    from vapo_megatron.cli.evaluate import checkpoint
    from vapo_megatron.rollout.input_warnings import tell_warnings

    given = {name: getattr(options, name) for name in ("samples", "temperature", "top_p", "top_k")}
    flags = [f"evaluation.{name}={value}" for name, value in given.items() if value is not None]
    config = checkpoint.evaluation_config(
        options.checkpoint, [*options.overrides, *flags], num_processes(options.nproc)
    )
    out = options.out or default_out(options.checkpoint, options.data)
    evaluation = checkpoint.check(options.checkpoint, options.data, config, out)
    if not under_torchrun():
        tell_warnings(evaluation.inputs)
    if config.parallel.world_size > 1 and not under_torchrun():
        checkpoint.check_out(out, evaluation)
        become_torchrun(config.parallel.world_size, worker)
    found = checkpoint.evaluate_checkpoint(evaluation, config, out, options.batch)
    if found is None:
        return None
    step = evaluation.header.get("step")
    of_step = "" if step is None else f" (step {step})"
    _print_table(found.whole, f"{options.checkpoint}{of_step} on {options.data}")
    for name, (count, statistics) in found.by_verifier.items():
        _print_table(statistics, f"{count} of {evaluation.header['num_problems']} problems: {name}")
    return out


def check_batch(batch: int | None) -> None:
    """Raise ConfigError if --batch is no number of problems."""
    if batch is not None and batch < 1:
        raise ConfigError(f"--batch={batch} must be at least 1")


def num_processes(nproc: int | None) -> int | None:
    """Return the processes on all nodes: torchrun's, else --nproc."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else nproc


def become_torchrun(world_size: int, worker: Sequence[str]) -> NoReturn:
    """Start this command on as many processes of this machine."""
    # Variables of a cluster's training job, such as NNODES, are not an evaluation's.
    processes = {"NPROC_PER_NODE": str(world_size)}
    execute(torchrun_command(processes, world_size, worker))


def default_out(checkpoint: Path, data: Path) -> Path:
    """Return runs/evaluation/PATH/DATA.jsonl, where PATH is relative to here or to the root."""
    path = checkpoint.resolve()
    start = Path.cwd() if path.is_relative_to(Path.cwd()) else path.anchor
    return Path("runs/evaluation") / path.relative_to(start) / f"{data.stem}.jsonl"


def _print_table(found: dict[str, Estimate], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("mean", justify="right")
    table.add_column("95% interval", justify="right")
    for name, estimate in found.items():
        form = ",.1f" if name == "response_length_mean" else ".4f"
        interval = "-"
        if estimate.low is not None and estimate.high is not None:
            interval = f"{format(estimate.low, form)} .. {format(estimate.high, form)}"
        label = name.replace("length_mean", "length (tokens)").replace("_", " ")
        table.add_row(label, format(estimate.value, form), interval)
    Console().print(table)


def _parser() -> Parser:
    usage = "vapo evaluate --checkpoint DIR --data FILE [options] [section.field=value ...]"
    parser = Parser(prog="vapo evaluate", usage=usage, description=__doc__)
    files = parser.add_argument_group("files")
    files.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="HF or run directory"
    )
    files.add_argument(
        "--data", type=Path, required=True, metavar="FILE",
        help="JSONL or parquet with the columns prompt and answer (vapo prepare)",
    )  # fmt: skip
    files.add_argument(
        "--out", type=Path, metavar="FILE",
        help="default: runs/evaluation/PATH/DATA.jsonl, where PATH is the checkpoint's; the "
        "summary has the same name, ending in .json",
    )  # fmt: skip
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--samples", type=int, metavar="K", help=f"per problem ({_DEFAULT} 32)")
    sampling.add_argument("--temperature", type=float, metavar="T", help=f"({_DEFAULT} 1.0)")
    sampling.add_argument("--top-p", type=float, metavar="P", help=f"({_DEFAULT} 0.7)")
    sampling.add_argument("--top-k", type=int, metavar="K", help=f"({_DEFAULT} -1, off)")
    add_process_options(parser, sampling)
    return parser


def add_process_options(parser: Parser, sampling: argparse._ArgumentGroup) -> None:
    """Add the overrides, --nproc and --batch, which `vapo select` has too."""
    sampling.add_argument(
        "overrides", nargs="*", metavar="section.field=value",
        help="fields of training that concern sampling, such as rollout.max_response_tokens=8192 "
        "rollout.tensor_model_parallel_size=4 rollout.gpu_memory_utilization=0.9 "
        "model.dtype=float32 seed=1",
    )  # fmt: skip
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

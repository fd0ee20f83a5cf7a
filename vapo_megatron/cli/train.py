"""Train a reasoning model with VAPO (arXiv 2504.05118).

  vapo train --config run.yaml algorithm.gamma=1.0          starts torchrun itself
  vapo train --config run.yaml --dry-run                    checks, prints the plan, starts nothing
  torchrun --nproc-per-node 8 -m vapo_megatron.train --config run.yaml

Configuration, model, tokenizer, data and checkpoint are checked before anything starts. Then
parallel.world_size processes start on this machine, and rollout.num_processes more that sample. On
several nodes, start the same command on each with NNODES, NODE_RANK and MASTER_ADDR set;
NPROC_PER_NODE, MASTER_PORT and MAX_RESTARTS have defaults. A run whose directory holds a checkpoint
resumes from it.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from vapo_megatron.cli.checks.sizes import check_published, is_published
from vapo_megatron.cli.command import Parser, is_first_rank
from vapo_megatron.cli.preflight import check_rank, check_run
from vapo_megatron.cli.torchrun import execute, torchrun_command
from vapo_megatron.config import VapoConfig, describe_fields, load_config, recipe_names
from vapo_megatron.config.vllm_args import advice
from vapo_megatron.errors import INTERRUPTED, ConfigError, UserError, has_reported, report, tell
from vapo_megatron.parallel import libraries
from vapo_megatron.parallel.environment import check_processes
from vapo_megatron.parallel.health import early_stop
from vapo_megatron.parallel.health.processes import end_now

SERVED = (
    "model", "parallel", "rollout", "algorithm", "reward", "environment", "evaluation", "logging",
    "timeouts",
)  # fmt: skip
"""Sections that a process that only samples needs."""


def main(
    argv: Sequence[str] | None = None,
    *,
    program: str = "python -m vapo_megatron.train",
    worker: Sequence[str] | None = None,
) -> int:
    """Check the configuration, then train.

    Args:
        argv: command line; None: this process's.
        program: its name in --help.
        worker: what torchrun runs on every process, once all is checked; None: train in this
            process.

    Returns:
        The exit code: 0; 2 for a user's mistake, which is one line; 130 when SIGINT has stopped it.
    """
    try:
        arguments = _parser(program).parse_intermixed_args(argv)
        if not arguments.config:
            raise ConfigError(
                "--config FILE is required: give a YAML file, such as vapo init writes, or a "
                f"recipe's name: {', '.join(recipe_names())}"
            )
        config = load_config(arguments.config, arguments.overrides)
        if arguments.dry_run:
            _dry_run(config, arguments.replay)
        elif worker is not None:
            command = torchrun_command(
                os.environ, config.num_processes, worker, config.rollout.num_processes
            )
            check_run(config, arguments.replay)
            early_stop.block_signals()
            execute(command)
        else:
            first = early_stop.end_before_first_step
            with early_stop.signals_blocked(), early_stop.interrupts_watched(first):
                return _train(config, arguments.replay)
    except UserError as error:
        report(f"error: {error}", 2)
        return 2
    return 0


def _parser(program: str) -> Parser:
    parser = Parser(
        prog=program,
        usage=f"{program} [--config FILE ...] [options] [section.field=value ...]",
        description=__doc__,
        epilog="fields (default, [the paper's symbol], meaning):\n\n" + describe_fields(),
    )
    configuration = parser.add_argument_group("configuration")
    configuration.add_argument(
        "--config", action="append", default=[], metavar="FILE",
        help="YAML file, or a recipe by its name: " + ", ".join(recipe_names()) + "; may be "
        "repeated, later ones win; scripts of examples/ bring their own",
    )  # fmt: skip
    configuration.add_argument(
        "overrides", nargs="*", metavar="section.field=value",
        help="set one field of those below; the value is read as YAML",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true",
        help="print the resolved configuration with its memory plan as comments, check the files "
        "that it names, ground truths too, and exit",
    )  # fmt: skip
    parser.add_argument(
        "--replay", type=Path, metavar="DIR",
        help="train on the rollouts that this run directory kept (logging.dump_steps), without "
        "vLLM, verifier and evaluation",
    )  # fmt: skip
    return parser


def _dry_run(config: VapoConfig, replay: Path | None) -> None:
    """Refuse what a run would refuse; then print configuration, plan and who judges how much."""
    if is_published(config):
        counts: list[str] = []
        check_published(config)
    else:
        counts = check_run(config, replay, all_answers=True)
    if is_first_rank():
        from vapo_megatron.planning.describe import dry_run_comment

        judges = "".join(f"# {line}\n" for line in counts)
        tell_advice(config)
        print(config.to_yaml() + dry_run_comment(config) + judges, end="")


def tell_advice(config: VapoConfig) -> None:
    """Warn on standard error about settings that are valid but probably mistakes."""
    for line in advice(config):
        tell(f"warning: {line}")


def _train(config: VapoConfig, replay: Path | None) -> int:
    """Train, or sample for those who do; return the exit code."""
    has_reported.clear()
    check_processes(config.parallel.world_size, config.rollout.num_processes)
    inputs = check_rank(config, replay)
    if is_first_rank():
        from vapo_megatron.rollout.input_warnings import tell_warnings

        libraries.report()
        tell_warnings(inputs)
        tell_advice(config)
    try:
        # Heavy imports come after the checks, so that a mistake is reported at once.
        if (
            config.rollout.is_disaggregated
            and int(os.environ["RANK"]) >= config.parallel.world_size
        ):
            from vapo_megatron.planning.host_memory import rollout_host_bytes
            from vapo_megatron.rollout.disaggregated.server import Server

            sections = {name: getattr(config, name) for name in SERVED}
            needed = rollout_host_bytes(inputs.shape, config, 1)
            with Server(inputs, needed.by_purpose, seed=config.seed, **sections) as server:
                server.serve()
        else:
            from vapo_megatron.training.loop import VapoTrainer

            with VapoTrainer(config, replay, inputs) as trainer:
                trainer.fit()
            # Under torchrun 0, which would start it again; its launcher's code is 130 all the same.
            if trainer.is_interrupted and "TORCHELASTIC_RUN_ID" not in os.environ:
                return INTERRUPTED
    except UserError:
        raise
    except BaseException as error:
        if not (has_reported.is_set() or "TORCHELASTIC_RUN_ID" in os.environ):
            raise
        # Libraries may wait forever for peers that are gone, and torchrun for this process.
        sys.stdout.flush()
        if not has_reported.is_set():
            report(f"error: {type(error).__name__}: {error}", 1, traceback.format_exc())
        end_now(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

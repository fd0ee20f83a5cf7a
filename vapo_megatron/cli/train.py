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
from typing import TYPE_CHECKING

from vapo_megatron.cli.command import Parser, check_processes, is_first_rank
from vapo_megatron.cli.launch import execute, torchrun_command
from vapo_megatron.cli.preflight import (
    check_answers,
    check_inputs,
    check_sizes,
    check_verifiers,
    is_here,
)
from vapo_megatron.config import VapoConfig, describe_fields, load_config
from vapo_megatron.data.storage import check_not_in_use
from vapo_megatron.errors import ConfigError, UserError, tell
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.models.known import known_shape
from vapo_megatron.parallel import libraries
from vapo_megatron.parallel.health import early_stop
from vapo_megatron.parallel.health.processes import end_now

if TYPE_CHECKING:
    from vapo_megatron.rollout.inputs import Inputs

SERVED = (
    "model", "parallel", "rollout", "algorithm", "reward", "evaluation", "logging", "timeouts",
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
        The exit code: 0; 2 for a user's mistake, which is one line; 130 when interrupted before
        anything has started.
    """
    try:
        arguments = _parser(program).parse_intermixed_args(argv)
        if not arguments.config:
            raise ConfigError("--config FILE is required: give a YAML file, or start a recipe")
        config = load_config(arguments.config, arguments.overrides)
        if arguments.dry_run:
            _dry_run(config, arguments.replay)
        elif worker is not None:
            command = torchrun_command(
                os.environ, config.num_processes, worker, config.rollout.num_processes
            )
            _check(config, arguments.replay)
            if arguments.replay is None:
                check_verifiers(config)
            execute(command)
        else:
            with early_stop.signals_blocked():
                _train(config, arguments.replay)
    except UserError as error:
        tell(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        if worker is None:
            raise
        tell("error: interrupted; nothing was started")
        return 130
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
        help="YAML file; may be repeated, later files win; recipes bring their own",
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
    """Print configuration, plan and who judges how much; refuse what a run would refuse here."""
    if is_first_rank():
        from vapo_megatron.planning.describe import dry_run_comment

        print(config.to_yaml() + dry_run_comment(config), end="", flush=True)
    if is_here(config):
        inputs = check_inputs(config, replay)
        counts = check_answers(config, inputs) if replay is None else []
        if is_first_rank():
            print("".join(f"# {line}\n" for line in counts), end="")
    elif config.model.hf_path is not None:
        check_sizes(config, known_shape(Path(config.model.hf_path).name))


def _train(config: VapoConfig, replay: Path | None) -> None:
    check_processes(config)
    inputs = _check(config, replay)
    if is_first_rank():
        libraries.report()
    try:
        # Heavy imports come after the checks, so that a mistake is reported at once.
        if config.rollout.is_apart and int(os.environ["RANK"]) >= config.parallel.world_size:
            from vapo_megatron.planning.host_memory import sampler_host_bytes
            from vapo_megatron.rollout.disaggregated.server import Server

            sections = {name: getattr(config, name) for name in SERVED}
            needed = sampler_host_bytes(inputs.shape, config, 1)
            with Server(inputs, needed.by_purpose, seed=config.seed, **sections) as sampler:
                sampler.serve()
        else:
            from vapo_megatron.loop import VapoTrainer

            with VapoTrainer(config, replay, inputs) as trainer:
                trainer.fit()
    except UserError:
        raise
    except BaseException:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise
        # Libraries may wait forever for peers that are gone, and torchrun for this process.
        sys.stdout.flush()
        traceback.print_exc()
        end_now(1)


def _check(config: VapoConfig, replay: Path | None) -> Inputs:
    """Check all that one process can, before torchrun starts and again on every rank."""
    if replay is not None and config.rollout.is_apart:
        raise ConfigError(
            f"--replay {replay} samples nothing and needs rollout.placement=colocated, found "
            "disaggregated; set rollout.placement=colocated rollout.num_processes=0 rollout.lag=0"
        )
    inputs = check_inputs(config, replay)
    check_not_in_use(Path(config.logging.run_dir))
    if replay is None:
        _check_memory(config, inputs.shape)
    return inputs


def _check_memory(config: VapoConfig, shape: ModelShape) -> None:
    """Refuse what cannot fit into this process's GPU; without a GPU nothing is checked."""
    import torch

    from vapo_megatron.planning.plan import check_fits

    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
        check_fits(config, shape, gpu.total_memory)


if __name__ == "__main__":
    sys.exit(main())

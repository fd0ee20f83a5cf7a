"""The only entry point: configuration -> process groups -> trainer -> fit.

torchrun --nproc-per-node N -m vapo_megatron.train --config FILE [section.field=value ...]
torchrun ... -m vapo_megatron.train --config FILE --replay DIR [section.field=value ...]
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from vapo_megatron.cli.command import Parser, check_processes
from vapo_megatron.cli.preflight import (
    check_answers,
    check_inputs,
    check_sizes,
    check_small_inputs,
    is_here,
)
from vapo_megatron.config import VapoConfig, describe_fields, load_config
from vapo_megatron.data.file_lock import check_not_in_use
from vapo_megatron.errors import ConfigError, UserError, tell
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.models.known import known_shape
from vapo_megatron.parallel.health import early_stop
from vapo_megatron.parallel.health.processes import end_now


def main(
    argv: Sequence[str] | None = None,
    start: Callable[[VapoConfig], None] | None = None,
    program: str = "python -m vapo_megatron.train",
) -> int:
    """Check the configuration, then train.

    Args:
        argv: command line; None: this process's.
        start: what to do with a configuration that has been checked; None: train in this process.
        program: what --help calls it.

    Returns:
        The exit code: 0, or 2 for a user's mistake, which is told in one line.
    """
    try:
        arguments = _parser(program).parse_intermixed_args(argv)
        if not arguments.config:
            raise ConfigError("--config FILE is required: give a YAML file, or start a recipe")
        config = load_config(arguments.config, arguments.overrides)
        if arguments.dry_run:
            _dry_run(config, arguments.replay)
        elif start is not None:
            check_small_inputs(config, arguments.replay)
            start(config)
        else:
            with early_stop.signals_blocked():
                _train(config, arguments.replay)
    except UserError as error:
        tell(f"error: {error}")
        return 2
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=program,
        description="Train a reasoning model with VAPO (arXiv 2504.05118).",
        epilog="fields (default, [the paper's symbol], meaning):\n\n" + describe_fields(),
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file; may be given several times, later files win; recipes bring their own",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved configuration, and as comments what it needs of GPUs, check the "
        "files that it names, and exit",
    )
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="DIR",
        help="train on the responses that this run directory kept (logging.dump_steps), without "
        "vLLM, verifier and evaluation",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.field=value",
        help="override one field; the value is read as YAML",
    )
    return parser


def _dry_run(config: VapoConfig, replay: Path | None) -> None:
    """Print the configuration and its plan, then refuse what a run would refuse here."""
    # RANK alone may be a cluster's number of a node.
    if "LOCAL_RANK" not in os.environ or os.environ.get("RANK", "0") == "0":
        from vapo_megatron.planning.describe import dry_run_comment

        print(config.to_yaml() + dry_run_comment(config), end="", flush=True)
    if is_here(config):
        inputs = check_inputs(config, replay)
        if replay is None:
            check_answers(config, inputs)
    elif config.model.hf_path is not None:
        check_sizes(config, known_shape(Path(config.model.hf_path).name))


def _train(config: VapoConfig, replay: Path | None) -> None:
    check_processes(config)
    inputs = check_inputs(config, replay)
    check_not_in_use(Path(config.logging.run_dir))

    # Heavy imports come after the checks, so that a mistake is reported at once.
    from vapo_megatron.loop import VapoTrainer

    if replay is None:
        _check_memory(config, inputs.shape)
    try:
        with VapoTrainer(config, replay, inputs) as trainer:
            trainer.fit()
    except UserError:
        raise
    except BaseException:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise
        # Libraries whose peers are gone may never end, and torchrun would wait for them.
        sys.stdout.flush()
        traceback.print_exc()
        end_now(1)


def _check_memory(config: VapoConfig, shape: ModelShape) -> None:
    """Refuse what cannot fit into this process's GPU; without a GPU nothing is checked.

    Raises:
        ConfigError: see planning.plan.check_fits.
    """
    import torch

    from vapo_megatron.planning.plan import check_fits

    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(int(os.environ["LOCAL_RANK"]))
        check_fits(config, shape, gpu.total_memory)


if __name__ == "__main__":
    sys.exit(main())

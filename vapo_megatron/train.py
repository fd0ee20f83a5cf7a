"""The only entry point: configuration -> process groups -> trainer -> fit.

torchrun --nproc-per-node N -m vapo_megatron.train --config FILE [section.field=value ...]
torchrun ... -m vapo_megatron.train --config FILE --replay DIR [section.field=value ...]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vapo_megatron.command import Parser, check_processes, tell
from vapo_megatron.config import VapoConfig, describe_fields, load_config
from vapo_megatron.errors import ConfigError, UserError


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
            # RANK alone may be a cluster's number of a node.
            if "LOCAL_RANK" not in os.environ or os.environ.get("RANK", "0") == "0":
                from vapo_megatron.planning.dry_run import dry_run_comment

                print(config.to_yaml() + dry_run_comment(config), end="")
            return 0
        require_paths(config, arguments.replay)
        if start is not None:
            start(config)
        else:
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
        help="print the resolved configuration, and as comments what it needs of GPUs, and exit",
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


def require_paths(config: VapoConfig, replay: Path | None, *, writes: bool = True) -> None:
    """Check what only a real run needs, before anything slow starts.

    Args:
        config: checked in itself.
        replay: the run directory that is replayed; None: none.
        writes: the run directory will be written to.

    Raises:
        ConfigError: a path is not set or does not exist, or a replay would write over its dump.
    """
    paths: dict[str, str | Path | None] = {"model.hf_path": config.model.hf_path}
    if replay is None:
        paths["data.train_path"] = config.data.train_path
    else:
        paths["--replay"] = replay
        run_dir = config.logging.run_dir
        dumps = [(replay / "replay").resolve(), replay.resolve()]
        if writes and Path(run_dir, "replay").resolve() in dumps:
            raise ConfigError(
                f"logging.run_dir={run_dir} is the run that is replayed, which would be written "
                "over; set logging.run_dir to another directory"
            )
    for name, path in paths.items():
        if path is None:
            raise ConfigError(f"{name} is required; set {name}=PATH")
        if not os.path.exists(path):
            raise ConfigError(f"{name}={path} does not exist; set {name} to an existing path")


def _train(config: VapoConfig, replay: Path | None) -> None:
    check_processes(config)

    # Heavy imports come after the checks, so that a mistake is reported at once.
    from vapo_megatron.trainer import VapoTrainer

    if replay is None:
        _check_memory(config)
    with VapoTrainer(config, replay) as trainer:
        trainer.fit()


def _check_memory(config: VapoConfig) -> None:
    """Refuse what cannot fit into this process's GPU; without a GPU nothing is checked.

    Raises:
        ConfigError: see planning.plan.check_fits.
    """
    import torch

    from vapo_megatron.models.hf_config import check_layout, read_model_shape
    from vapo_megatron.planning.plan import check_fits

    if torch.cuda.is_available():
        shape = read_model_shape(str(config.model.hf_path))
        check_layout(shape, config.parallel)
        gpu = torch.cuda.get_device_properties(int(os.environ["LOCAL_RANK"]))
        check_fits(config, shape, gpu.total_memory)


if __name__ == "__main__":
    sys.exit(main())

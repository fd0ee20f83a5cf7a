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

from vapo_megatron.config import VapoConfig, describe_fields, load_config
from vapo_megatron.errors import ConfigError, UserError


def main(
    argv: Sequence[str] | None = None, start: Callable[[VapoConfig], None] | None = None
) -> int:
    """Check the configuration, then train.

    Args:
        argv: command line; None: this process's.
        start: what to do with a configuration that has been checked; None: train in this process.

    Returns:
        The exit code: 0, or 2 for a user's mistake, which is told in one line.
    """
    arguments = _parser().parse_intermixed_args(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        if arguments.dry_run:
            if os.environ.get("RANK", "0") == "0":
                print(config.to_yaml(), end="")
            return 0
        require_paths(config, arguments.replay)
        if start is not None:
            start(config)
        else:
            _train(config, arguments.replay)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vapo_megatron.train",
        description="Train a reasoning model with VAPO (arXiv 2504.05118).",
        epilog="fields (default, [the paper's symbol], meaning):\n\n" + describe_fields(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML file; may be given several times, later files win",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and exit"
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


def check_processes(config: VapoConfig) -> None:
    """Check the number of processes; one that torchrun did not start becomes a world of one.

    Raises:
        ConfigError: parallel.world_size is not the number of processes started.
    """
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != config.parallel.world_size:
        raise ConfigError(
            f"parallel.world_size={config.parallel.world_size} must be the number of processes "
            f"started, {started}; set parallel.world_size={started} or torchrun's --nproc-per-node "
            "and --nnodes"
        )
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0" if os.environ["WORLD_SIZE"] == "1" else "29500")


def _train(config: VapoConfig, replay: Path | None) -> None:
    check_processes(config)

    # Heavy imports come after the checks, so that a mistake is reported at once.
    from vapo_megatron.trainer import VapoTrainer

    with VapoTrainer(config, replay) as trainer:
        trainer.fit()


if __name__ == "__main__":
    sys.exit(main())

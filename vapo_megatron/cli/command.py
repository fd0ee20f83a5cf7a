"""What commands share: a user's mistake is one line and exit code 2, an interrupt exit code 130."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from vapo_megatron.errors import ConfigError, UserError, tell

if TYPE_CHECKING:
    from vapo_megatron.config import VapoConfig


class Parser(argparse.ArgumentParser):
    """Raises a mistake as every other one is raised, without the usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise ConfigError(f"{message}; --help shows what there is")


def run(
    command: str,
    work: Callable[[], object],
    *,
    interrupted: str,
    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
) -> int:
    """Do the work; the first rank prints what it returns, unless that is None or an exit code.

    Args:
        command: begins each line that is told.
        work: reads its arguments, too.
        interrupted: what an interrupt leaves behind, for people.
        signals: those that interrupt: each ends the work as Ctrl-C does.

    Returns:
        The exit code: the work's, or 0; 2 with one line after an error that the user can put right;
        130 when interrupted.
    """
    caught = []

    def interrupt(*_: Any) -> None:
        caught.append(True)
        raise KeyboardInterrupt

    earlier = {s: signal.signal(s, interrupt) for s in signals}
    try:
        result = work()
    except BaseException as error:
        # An interrupt may reach us as another exception, out of compiled code that was at work.
        if caught:
            tell(f"{command}: interrupted; {interrupted}")
            return 130
        if not isinstance(error, (UserError, OSError)):
            raise
        tell(f"{command}: {error}")
        return 2
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
    if isinstance(result, int):
        return result
    if result is not None and os.environ.get("RANK", "0") == "0":
        print(result)
    return 0


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


def add_conversion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --out and --overwrite, which both conversions have."""
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="made whole under this name, or not at all"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an earlier conversion; nothing else is"
    )

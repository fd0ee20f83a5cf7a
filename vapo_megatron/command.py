"""What commands share: a user's mistake is one line and exit code 2, an interrupt exit code 130."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from vapo_megatron.errors import ConfigError, UserError

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


def tell(mistake: str, file: TextIO | None = None) -> None:
    """Print a mistake once on each node that has it: the first of its processes to meet it does.

    Not the first rank: its node may be in order, and torchrun ends a node's other processes as soon
    as one has failed, perhaps before they could speak.

    Args:
        mistake: a line.
        file: where to; None: standard error.
    """
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # In torchrun's own directory of this attempt on this node: ATTEMPT/LOCAL_RANK/error.json.
        told = Path(error_file).parents[1] / f"told_{zlib.crc32(mistake.encode()):08x}"
        try:
            told.touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:
            pass  # The directory is full or gone: told more than once rather than never.
    print(mistake, file=file or sys.stderr, flush=True)


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

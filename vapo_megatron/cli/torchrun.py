"""Runs torchrun's agent, and reports the first failing worker's error when all have ended.

torchrun's own report is 25 lines and more without the error itself. Here the agent's loggers are
off, workers write their error to torch's error files (errors.report), and the first failure's is
printed once all have ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from vapo_megatron.errors import INTERRUPTED, LAUNCHER, ConfigError, report
from vapo_megatron.parallel.health import early_stop

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

GPUS_PER_NODE = 8
MODULE = "vapo_megatron.cli.torchrun"
_CPP_LOGS = "TORCH_CPP_LOG_LEVEL"


class LastWords(NamedTuple):
    """Why a process has ended."""

    line: str
    code: int
    trace: str = ""
    time: float = 0.0
    """In seconds since 1970."""


def torchrun_command(
    environment: Mapping[str, str],
    world_size: int,
    worker: Sequence[str],
    num_rollout_workers: int = 0,
) -> list[str]:
    """Return the torchrun command line that the usual cluster variables describe.

    Args:
        environment: NNODES (default 1); NPROC_PER_NODE (default: the processes of this node, at
            most 8); with several nodes NODE_RANK and MASTER_ADDR; MASTER_PORT (default: 29500, on
            one node a free one); MAX_RESTARTS (default 0), how often torchrun restarts the
            processes after a failure.
        world_size: number of processes on all nodes.
        worker: script or `-m module`, and its arguments.
        num_rollout_workers: how many of them are rollout.num_processes.

    Raises:
        ConfigError: a variable is missing or not a number, or their product is not world_size.
    """
    num_nodes = _number(environment, "NNODES", 1, least=1)
    per_node = _number(environment, "NPROC_PER_NODE", min(GPUS_PER_NODE, world_size), least=1)
    if num_nodes * per_node != world_size:
        sampling = f" + rollout.num_processes={num_rollout_workers}" if num_rollout_workers else ""
        raise ConfigError(
            f"parallel.world_size={world_size - num_rollout_workers}{sampling} must be "
            f"NNODES({num_nodes}) * NPROC_PER_NODE({per_node}) = {num_nodes * per_node}; set the "
            f"variables, or parallel.world_size={num_nodes * per_node - num_rollout_workers} with "
            "a layout that fits it"
        )
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if not environment.get(name)]
    if num_nodes > 1 and missing:
        raise ConfigError(
            f"NNODES={num_nodes} needs {' and '.join(missing)}: set NODE_RANK to 0, 1, ... on each "
            "node and MASTER_ADDR to the first node's address on all, or start torchrun yourself"
        )

    node_rank = _number(environment, "NODE_RANK", 0, least=0)
    if node_rank >= num_nodes:
        raise ConfigError(
            f"NODE_RANK={node_rank} must be less than NNODES={num_nodes}; nodes count from 0"
        )
    port = 29500 if num_nodes > 1 else _free_port()
    # torchrun wants its own -m before `--`.
    module_flag = ["-m"] if worker[0] == "-m" else []
    return [
        *(sys.executable, "-m", MODULE),
        f"--nnodes={num_nodes}",
        f"--node-rank={node_rank}",
        f"--master-addr={environment.get('MASTER_ADDR') or '127.0.0.1'}",
        f"--master-port={_number(environment, 'MASTER_PORT', port, least=1)}",
        f"--nproc-per-node={per_node}",
        f"--max-restarts={_number(environment, 'MAX_RESTARTS', 0, least=0)}",
        *module_flag,
        # Without it torchrun refuses a worker's option that is short for several of its own.
        "--",
        *worker[len(module_flag) :],
    ]


def execute(command: Sequence[str]) -> NoReturn:
    """Replace this process by a command."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], list(command))


def _number(environment: Mapping[str, str], name: str, default: int, *, least: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(
            f"{name}={text} must be a whole number of at least {least}; for ranges, restarts and "
            "other rendezvous start torchrun yourself"
        )
    return int(text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the workers that a torchrun command line names, and wait for them.

    Returns:
        The exit code: 0; 2 for a user's mistake; 130 if SIGINT has stopped the workers; else 1.
    """
    os.environ[LAUNCHER] = str(os.getpid())
    with contextlib.ExitStack() as stack:
        if signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            watching = early_stop.interrupts_watched(_interrupting(), is_launcher=True)
            stack.enter_context(watching)
        else:
            early_stop.end_on_interrupt("error: interrupted; nothing was started")
        words = _watch_workers(sys.argv[1:] if arguments is None else arguments)
    if words is None:
        return 0
    report(words.line, words.code, words.trace)
    return words.code


def _watch_workers(arguments: Sequence[str]) -> LastWords | None:
    try:
        with tempfile.TemporaryDirectory(prefix="vapo_", ignore_cleanup_errors=True) as logs:
            return last_words(Path(logs), _run_agent(arguments, logs))
    except OSError as error:
        return LastWords(f"error: the processes cannot be started: {error}", 2)


def _run_agent(arguments: Sequence[str], logs: str) -> dict[int, ProcessFailure] | LastWords:
    """Run torch's agent until the workers have ended; return those that failed, by rank."""
    # What it logs is about itself. Its C++ part reads the variable when it is loaded.
    is_quiet = "LOGLEVEL" not in os.environ
    if is_quiet:
        logging.disable()
    cpp_logs = os.environ.get(_CPP_LOGS)
    os.environ.setdefault(_CPP_LOGS, "FATAL")
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    # Read when torch was loaded; workers would inherit it.
    if cpp_logs is None:
        del os.environ[_CPP_LOGS]

    options = run.parse_args([f"--log-dir={logs}", *arguments])
    config, command, command_arguments = run.config_from_args(options)
    place = f"MASTER_ADDR={options.master_addr} and MASTER_PORT={options.master_port}"
    try:
        elastic_launch(config, command)(*command_arguments)
    except ChildFailedError as error:
        return error.failures
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        return LastWords(f"error: stopped by {name}", INTERRUPTED)
    except (DistError, RendezvousError, OSError) as error:
        if "EADDRINUSE" in str(error):
            return LastWords(
                f"error: MASTER_PORT={options.master_port} is in use on this machine; end what "
                "uses it, or set MASTER_PORT to a free port, the same one on all nodes",
                2,
            )
        return LastWords(
            f"error: the nodes do not find each other: {_one_line(error)}; check {place}, and that "
            "the same command runs on every node",
            2,
        )
    except Exception as error:
        return LastWords(f"error: {_one_line(error)}", 1, traceback.format_exc())
    return {}


def last_words(logs: Path, failures: Mapping[int, ProcessFailure] | LastWords) -> LastWords | None:
    """Return the first failure's last words; None if all is well.

    Args:
        logs: torch's directory of error files.
        failures: of the agent's last start, by rank; or what has ended the agent itself.
    """
    attempts = sorted(logs.glob("*/attempt_*"), key=lambda d: int(d.name.rpartition("_")[2]))
    files = attempts[-1].glob("*/error.json") if attempts else ()
    said = [LastWords(**own) for own in map(_own_words, files) if own is not None]
    first = min(said, key=lambda words: words.time, default=None)
    if isinstance(failures, LastWords):
        return first or failures
    silent = {
        rank: failure for rank, failure in failures.items()
        if _own_words(Path(failure.error_file)) is None
        # So the agent ends the others of a failed worker, and 30 s later by SIGKILL.
        and (first is None or failure.exitcode != -signal.SIGTERM)
    }  # fmt: skip
    if not silent:
        return first if failures or (first and first.code == INTERRUPTED) else None
    rank, failure = min(silent.items(), key=lambda item: item[1].timestamp)
    # Of a silent one only the second is known in which it was missed; others need longer for that.
    if first is not None and first.time < failure.timestamp + 1:
        return first
    line = f"error: {_describe(rank, failure)}"
    if first is not None:
        line += f"; {first.line.removeprefix('error: ')}"
    return LastWords(line, 2 if failure.exitcode == 2 else 1)


def _own_words(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text())["own"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _describe(rank: int, failure: ProcessFailure) -> str:
    process = f"rank {rank} (process {failure.pid})"
    if failure.exitcode >= 0:
        return f"{process} ended with exit code {failure.exitcode}; what it printed is above"
    number = -failure.exitcode
    why = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"{process} was killed by signal {number}, {signal.Signals(number).name}{why}"


def _interrupting() -> Callable[[], None]:
    """Return what forwards SIGINT: torch gives workers sessions of their own, without a terminal.

    It is called again and again, and the agent may need a while to see that all have ended.
    """
    had_workers = False

    def interrupt() -> None:
        import psutil

        nonlocal had_workers
        workers = psutil.Process().children()
        if not workers and not had_workers:
            report("error: interrupted; no process was running", INTERRUPTED)
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        had_workers = True
        for worker in workers:
            try:
                worker.send_signal(signal.SIGINT)
            except psutil.Error:
                pass  # It has ended.

    return interrupt


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


if __name__ == "__main__":
    sys.exit(main())

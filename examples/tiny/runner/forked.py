"""Runs trainers in forks of a process that has imported torch, megatron-core and vLLM.

The imports are 17 seconds on one core, and a run of twenty steps takes two minutes. A fork has them
from its start. It trains what a process of its own would, bit by bit.
"""

from __future__ import annotations

import importlib
import io
import multiprocessing.context
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TRAINER = ("-m", "vapo_megatron.train")
LIBRARIES = ("vapo_megatron.training.loop", "vapo_megatron.rollout.vllm.engine")
"""Modules that import all that a run needs."""


def can_fork(command: Sequence[str]) -> bool:
    """Whether a command is a script of this Python, or the trainer of a single process."""
    if command[0] != sys.executable:
        return False
    return tuple(command[1:3]) == TRAINER or command[1].endswith(".py")


def import_libraries(environment: Mapping[str, str]) -> None:
    """Import what forks share, into their environment: libraries read it then, and add to it."""
    os.environ.update(environment)
    for name in LIBRARIES:
        importlib.import_module(name)


class Fork(multiprocessing.context.ForkProcess):
    """A command in a fork of this process; has the used part of subprocess.Popen."""

    pid: int

    def __init__(self, command: Sequence[str], log: Path, cwd: Path) -> None:
        """Start it in a session of its own.

        Args:
            command: see can_fork.
            log: file to which its output is appended.
            cwd: its working directory.
        """
        super().__init__(target=_run, args=(command, log, cwd))
        self.start()

    returncode = multiprocessing.context.ForkProcess.exitcode
    """Exit code, minus the signal's number if killed; None: it runs."""

    def poll(self) -> int | None:
        """Return the exit code; None: it runs."""
        return self.exitcode

    def wait(self) -> int | None:
        """Wait for its end; return the exit code."""
        self.join()
        return self.exitcode


def _run(command: Sequence[str], log: Path, cwd: Path) -> None:
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # As for a new process: what is ignored stays ignored, what is handled is not inherited.
        if signal.getsignal(number) != signal.SIG_IGN:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # Else lines would wait in the buffer, and be lost if the fork is killed.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    os.chdir(cwd)
    is_module = command[1] == "-m"
    name, *arguments = command[2:] if is_module else command[1:]
    sys.argv = [name, *arguments]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")

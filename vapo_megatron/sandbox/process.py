"""A process that loads a handler, with its children, and what it is told on its stdin first."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vapo_megatron
from vapo_megatron.sandbox.channel import DIED, Channel, Reply, message

START_LIMIT_SECONDS = 120.0
"""Longest wait for a process's imports; a loaded machine takes many times the usual half second."""
MAX_FAILED_STARTS = 3
"""Failed starts in a row after which the environment is taken to be broken."""


class HandlerRefused(Exception):
    """A process could not load its handler; the message is its traceback."""


class Process(Channel):
    """One process that is started with its set-up.

    Args:
        command: what to run.
        setup: see setup_message.
        files: more of this process's files that it is given, by their numbers here.
    """

    def __init__(self, command: Sequence[str], setup: bytes, files: Sequence[int] = ()) -> None:
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
        # A new session, so that its children can be killed with it.
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment,
            start_new_session=True, pass_fds=files,
        )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self._pipes = self.process.stdin, self.process.stdout
        super().__init__(*(pipe.fileno() for pipe in self._pipes))
        self.ready = False
        self.deadline = time.monotonic() + START_LIMIT_SECONDS
        self.unsent = memoryview(setup)

    def kill(self) -> None:
        """End it and its children."""
        # Not by its process's poll first: its group outlives it while a child of it is there.
        kill_group(self.process.pid)
        self.process.wait()
        for pipe in self._pipes:
            pipe.close()

    def kill_after(self, reply: Reply) -> None:
        """End it when this has come in place of what a loaded handler says of itself."""
        if reply is DIED:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)  # Its pipe closes before it has printed its error.
        self.kill()

    def broken(self) -> RuntimeError:
        """Return the error of a process that never starts."""
        return RuntimeError(
            f"the worker {' '.join(map(str, self.process.args))} did not start: exit code "  # type: ignore[arg-type]
            f"{self.process.returncode}, its error is above"
        )


def kill_group(leader: int) -> None:
    """Kill a process and those that it has started, if they are there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def command(script: str) -> list[str]:
    """Return how a script of this folder is run."""
    # -P: a file in the script's or the current directory must not shadow a library there.
    return [sys.executable, "-P", str(Path(__file__).with_name(script))]


def setup_message(
    handler: str, options: Mapping[str, Any], timeout_seconds: float, memory_bytes: int
) -> bytes:
    """Return a process's first message; see worker.py.

    Args:
        handler: "module:function".
        options: the function's arguments.
        timeout_seconds: limit for one request.
        memory_bytes: address space that a process may take beyond what its handler took to load.
    """
    package = str(Path(vapo_megatron.__file__).parents[1])
    setup = {
        "sys_path": [*sys.path, package],
        "handler": handler,
        "options": dict(options),
        "timeout_seconds": timeout_seconds,
        "memory_bytes": memory_bytes,
    }
    return message(setup)

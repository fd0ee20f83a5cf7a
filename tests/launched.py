"""Processes of one command, started as torchrun starts them but for its agent.

Like those of workers.py they are forked from one that has imported what they need: most of the
seconds of a short run are imports.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.workers import context, free_port, keep_imported

ROOT = Path(__file__).resolve().parents[1]
SECRET = "hf_nobody_may_write_this_down"
"""In the environment of each process."""


class Done(NamedTuple):
    """What processes that have ended leave."""

    returncode: int
    """0, or that of the first rank that failed."""
    stdout: str
    stderr: str


class Launched:
    """Processes of one command, with torchrun's environment and without its agent."""

    def __init__(self, function: Callable[..., int], *args: Any, world_size: int = 1) -> None:
        """Start them: each calls function(*args), which returns its exit code, in the repository.

        Args:
            function: at the top level of a module.
        """
        self._out = tempfile.TemporaryDirectory(prefix="vapo_launched_")
        port = str(free_port())
        here = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        here["HF_TOKEN"] = SECRET
        self._processes = []
        for rank in range(world_size):
            environment = {**here, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context().Process(
                target=_command, args=(self._out.name, environment, function, args)
            )
            process.start()
            self._processes.append(process)

    def is_running(self) -> bool:
        """Whether all processes are."""
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """Send each SIGKILL."""
        for process in self._processes:
            process.kill()
            process.join()

    def ended(
        self, apart_from: Sequence[int] = (), timeout_seconds: float = 100
    ) -> tuple[list[int | None], Done]:
        """Wait until all have ended by themselves but for some ranks, which are killed then.

        Returns:
            (exit code of each rank, None where it had to be killed; what they have said).
        """
        deadline = time.monotonic() + timeout_seconds
        for rank, process in enumerate(self._processes):
            if rank not in apart_from:
                process.join(deadline - time.monotonic())
        codes = [process.exitcode for process in self._processes]
        self.kill()
        return codes, self._done(0)

    def wait(self, timeout_seconds: float = 900) -> Done:
        """Wait until all have ended; where one fails, end the others, as torchrun does."""
        deadline = time.monotonic() + timeout_seconds
        while any(process.is_alive() for process in self._processes):
            wait([p.sentinel for p in self._processes if p.is_alive()], 1)
            failed = [p.exitcode for p in self._processes if p.exitcode]
            if failed or time.monotonic() > deadline:
                for process in self._processes:
                    process.join(5)
                self.kill()
                return self._done(failed[0] if failed else -1)
        return self._done(0)

    def _done(self, returncode: int) -> Done:
        codes = [p.exitcode for p in self._processes if p.exitcode]
        texts = (Path(self._out.name, name).read_text() for name in ("stdout", "stderr"))
        return Done(returncode or (codes[0] if codes else 0), *texts)


def _command(
    out: str, environment: dict[str, str], function: Callable[..., int], args: tuple
) -> None:
    os.environ.update(environment, OMP_NUM_THREADS="1")
    os.chdir(ROOT)
    sys.stdout.flush()
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(out, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
    keep_imported()
    sys.exit(function(*args))

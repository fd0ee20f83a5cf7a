"""Real gloo processes for the distributed tests: started once, reused by every test, never mocked.

`run(world_size, function, *args)` calls `function(*args)` on ranks 0..world_size-1, each inside an
initialised gloo process group, and returns the list of their results. An exception on any rank is
raised in the test with that rank's traceback; a hang kills the processes, fails the test, and the
next test gets fresh ones. Function and results must be picklable: define the function at the top
level of the test module.

The processes are forked from one that has imported the package (and vLLM, where a chosen test needs
it) and has done nothing else. So they share their hash seed, and sets of names come in the same
order on all ranks; with `-m slow`, and under torchrun in tests/e2e, each process starts by itself.
Where xdist divides the tests, its processes share the one that is forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import math
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil

IDLE_SECONDS, BUSY_SHARE = 60.0, 0.005
LOOK_SECONDS = 2.0

_start_method = "forkserver"
_SHARED = "VAPO_TESTS_FORK_SERVER"
"""Environment variable: the address of the fork server that xdist's processes share."""


def share(modules: Sequence[str]) -> None:
    """Begin to import what all processes need, once for all of xdist's, which start after this."""
    prepare(modules, each_by_itself=False)
    os.environ[_SHARED] = multiprocessing.forkserver._forkserver._forkserver_address


def join() -> None:
    """Fork from the shared server in place of one of this process."""
    server = multiprocessing.forkserver._forkserver
    server._forkserver_address = os.environ[_SHARED]
    # A server ends when nobody holds its pipe; this one's is held by the process that started it.
    server._forkserver_alive_fd = os.pipe()[1]
    server.ensure_running = multiprocessing.resource_tracker.ensure_running


def prepare(modules: Sequence[str], *, each_by_itself: bool) -> None:
    """Begin to import what all processes need, while the first tests run in this one.

    Args:
        modules: by name; a process that needs others imports them itself.
        each_by_itself: no process is forked, each imports everything.
    """
    global _start_method
    _start_method = "spawn" if each_by_itself else "forkserver"
    if _SHARED in os.environ:
        join()
    elif modules and not each_by_itself:
        multiprocessing.set_forkserver_preload(list(modules))
        multiprocessing.forkserver.ensure_running()


def context(start_method: str | None = None) -> Any:
    """Return the multiprocessing context that the tests' processes are started with."""
    return multiprocessing.get_context(start_method or _start_method)


def free_port() -> int:
    """Return a free TCP port that the kernel gives to no other process in the meantime.

    A port of its choice (bind to 0) may become another process's before a test listens on it: every
    connection takes one from the same range. So these lie below that range, and each process of
    the tests counts through a block of its own.
    """
    for port in itertools.islice(_ports, _END_PORT - _FIRST_PORT):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError("no free port below the kernel's range")


_FIRST_PORT, _END_PORT, _BLOCK = 10_000, 30_000, 100  # the kernel's range begins at 32,768
_offset = os.getpid() * _BLOCK % (_END_PORT - _FIRST_PORT)
_ports = itertools.cycle(
    [*range(_FIRST_PORT + _offset, _END_PORT), *range(_FIRST_PORT, _FIRST_PORT + _offset)]
)


def keep_imported() -> None:
    """Spare the collector what has been imported: 700,000 objects, a quarter of a second each time.

    vLLM collects five times for each engine, and unfreezes everything when one ends.
    """
    gc.freeze()
    gc.unfreeze = lambda: None


def share_device() -> None:
    """Let all process groups that this process will have share one device of gloo.

    torch gives each group its own, whose thread wakes a hundred times a second: the 30 groups of a
    trainer take 3 % of a core while nothing happens, those that a test leaves behind as well.
    """
    import torch.distributed as dist

    gloo = dist.ProcessGroupGloo
    device = gloo.create_default_device()
    # A process that is forked from one with a device needs its own; that one's thread is not in it,
    # and a device that is freed waits for its thread.
    _kept.append(gloo.__init__)
    create = _kept[0]

    def on_the_device(group, store, rank, size, timeout=dist.default_pg_timeout):
        options = gloo._Options()
        options._devices, options._timeout = [device], timeout
        create(group, store, rank, size, options)

    gloo.__init__ = on_the_device


_kept: list[Callable] = []
"""What share_device has replaced, torch's first."""


def _serve(connection: Connection, first: Sequence[str]) -> None:
    for module in first:
        importlib.import_module(module)
    os.environ.update(OMP_NUM_THREADS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    share_device()
    keep_imported()
    while True:
        try:
            task = connection.recv()
        except EOFError:  # the tests are gone
            return
        if task is None:
            return
        rank, world_size, port, init_file, function, args = task
        # For a function that leaves its group and lets a trainer make another.
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )  # fmt: skip
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{init_file}", rank=rank, world_size=world_size
            )
            # A function may leave the group at once, while another rank is still connecting to it.
            dist.barrier()
            connection.send((True, function(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        finally:
            _reset()


def _reset() -> None:
    import sys

    import torch.distributed as dist

    groups = sys.modules.get("vapo_megatron.parallel.groups")
    if groups is not None:
        groups.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()
    # Models hold groups in reference cycles, and each group keeps threads.
    gc.collect()


class _Hang:
    """Whether processes have come to nothing, by what they and their children take of the CPUs."""

    def __init__(self, process_ids: Sequence[int], limit_seconds: float) -> None:
        self._processes = [psutil.Process(process_id) for process_id in process_ids]
        self._limit_seconds = limit_seconds
        self._begun = self._busy = self._used()
        self._busy_at = time.monotonic()

    def _used(self) -> float:
        used = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                for each in (process, *process.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        used += sum(each.cpu_times()[:4])
        return used

    def found(self) -> str:
        """Return why they hang; "": they do not."""
        used, now = self._used(), time.monotonic()
        if used - self._begun > self._limit_seconds * len(self._processes):
            return f"ranks did not answer within {self._limit_seconds} s of CPU time each"
        if used - self._busy > BUSY_SHARE * (now - self._busy_at):
            self._busy, self._busy_at = used, now
        elif now - self._busy_at > IDLE_SECONDS:
            return f"ranks did nothing for {IDLE_SECONDS:g} s"
        return ""


class WorkerPool:
    """A lazily grown set of worker processes.

    start_method: "spawn" for processes that must import everything themselves; None: as prepared.
    first: modules that they import before anything else.
    """

    def __init__(self, start_method: str | None = None, first: Sequence[str] = ()) -> None:
        self._start_method, self._first = start_method, first
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self, world_size: int, function: Callable, *args: Any, timeout_seconds: float = 120
    ) -> list[Any]:
        """Call function(*args) on world_size ranks; see the module's docstring.

        timeout_seconds: limit of CPU time for each rank, which other work on the machine does not
            shorten. Ranks that take next to none for IDLE_SECONDS hang.
        """
        while len(self._workers) < world_size:
            starting = context(self._start_method)
            ours, theirs = starting.Pipe()
            # Not daemonic: megatron-core's checkpoint writer starts processes of its own.
            process = starting.Process(target=_serve, args=(theirs, self._first))
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        handle, init_file = tempfile.mkstemp(prefix="vapo_init_")
        os.close(handle)
        os.unlink(init_file)
        pipes = [c for _, c in self._workers[:world_size]]
        port = str(free_port())
        for rank, pipe in enumerate(pipes):
            pipe.send((rank, world_size, port, init_file, function, args))
        results: dict[int, Any] = {}
        failure = ""
        hang = _Hang([w.pid for w, _ in self._workers[:world_size]], timeout_seconds)
        deadline = math.inf
        while len(results) < world_size:
            waiting = [p for r, p in enumerate(pipes) if r not in results]
            ready = wait(waiting, LOOK_SECONDS)
            if not ready:
                failure = failure or hang.found()
                if failure and (time.monotonic() > deadline or deadline == math.inf):
                    break
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    ok, results[rank] = pipe.recv()
                except EOFError:
                    ok, results[rank] = False, "the process died"
                if not ok:
                    failure = failure or f"rank {rank}: {results[rank]}"
                    # The others may wait for this one in a collective, or fail alike in a moment.
                    deadline = min(deadline, time.monotonic() + 5)
        if failure:
            if len(results) < world_size or "the process died" in results.values():
                self.close(gently=False)
            raise AssertionError(failure)
        return [results[r] for r in range(world_size)]

    def close(self, *, gently: bool = True) -> None:
        """End every worker; gently: let it clean up first."""
        for worker in self._workers:
            _end(*worker, gently=gently)
        self._workers.clear()


def _end(process: Any, connection: Connection, *, gently: bool) -> None:
    with contextlib.suppress(OSError):
        connection.send(None)
    process.join(1.0 if gently else 0.0)
    process.kill()
    process.join()
    connection.close()

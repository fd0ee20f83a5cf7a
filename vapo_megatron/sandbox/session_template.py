"""Forks the processes of sessions.py: the handler is loaded once, here.

Run as a script, with the number of a socket; set up as worker.py is, and ready or refused as that.
Then a message on the socket is JSON; "fork" comes with two files, that of a session's requests and
that of its replies, which the new process serves as a worker does, with a handler of its own.

    {"fork": true}    {"process": id} or {"error": traceback}
    {"end": id}       none; what is left of the process, and of those that it started, is killed

It ends, with all of these, when the socket closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from vapo_megatron.sandbox.worker import Loaded

MESSAGE_BYTES = 1 << 12
MAX_ERROR_CHARACTERS = 2000
_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36


def main(number: int) -> None:
    """Serve until the socket closes."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from vapo_megatron.sandbox import worker

    with socket.socket(fileno=number) as orders, worker.own_pipes() as (requests, output):
        about, loaded = worker.load(requests, output)
        if loaded is None:
            return
        template = _Template(orders, loaded, (requests, output))
        gc.collect()
        gc.freeze()  # So that a forked process's collections do not copy all pages.
        worker.send(output, {"ready": about})
        try:
            template.serve()
        finally:
            template.end_all()


class _Template:
    def __init__(
        self, orders: socket.socket, loaded: Loaded, pipes: tuple[BinaryIO, BinaryIO]
    ) -> None:
        self._orders, self._loaded, self._pipes = orders, loaded, pipes
        self._control = ctypes.CDLL(None, use_errno=True).prctl
        self._process = os.getpid()
        # Those that a session leaves behind become the children of this process, not of init.
        self._control(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._kept = _children()
        """What is not a stray: the sessions, and what the handler has started on loading."""
        self._sessions = set[int]()

    def serve(self) -> None:
        """Do as the messages say."""
        while True:
            message, files, _, _ = socket.recv_fds(self._orders, MESSAGE_BYTES, 2)
            if not message:
                return
            order = json.loads(message)
            if "end" in order:
                self._end(order["end"])
                continue
            try:
                reply: dict[str, Any] = {"process": self._fork(files)}
            except OSError:
                reply = {"error": traceback.format_exc()[-MAX_ERROR_CHARACTERS:]}
            finally:
                for file in files:
                    os.close(file)
            self._orders.send(json.dumps(reply).encode())

    def end_all(self) -> None:
        """End every session."""
        for process in self._sessions.copy():
            self._end(process)

    def _end(self, process: int) -> None:
        if process not in self._sessions:
            return
        self._sessions.discard(process)
        self._kept.discard(process)
        # Nobody has waited for it: its number is its own, and its group there.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        _wait(process)
        # What has left the group is now a child of this process, and after it what that started.
        while strays := _children() - self._kept:
            for stray in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stray, signal.SIGKILL)
                _wait(stray)

    def _fork(self, files: Sequence[int]) -> int:
        process = os.fork()
        if process:
            self._sessions.add(process)
            self._kept.add(process)
            return process
        try:
            self._be_session(*files)
        except BrokenPipeError:
            pass  # Nobody wants the reply any more.
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stderr.flush()
            os._exit(0)

    def _be_session(self, asks: int, answers: int) -> None:
        from vapo_megatron.sandbox import worker

        os.setsid()
        self._control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        self._control(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if os.getppid() != self._process:
            return
        self._orders.close()
        for pipe in self._pipes:
            pipe.close()
        # Loading may have changed them.
        worker.ignore_signals()
        for number in (signal.SIGALRM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for file in (asks, answers):
            os.set_inheritable(file, False)
        worker.limit_memory(self._loaded.memory_bytes)
        with os.fdopen(asks, "rb") as requests, os.fdopen(answers, "wb") as output:
            worker.serve(self._loaded, requests, output)


def _children() -> set[int]:
    """Return this process's; none where the kernel does not say (CONFIG_PROC_CHILDREN)."""
    found = set[int]()
    for thread in os.listdir("/proc/self/task"):
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError),
            open(f"/proc/self/task/{thread}/children") as file,
        ):
            found.update(map(int, file.read().split()))
    return found


def _wait(process: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))

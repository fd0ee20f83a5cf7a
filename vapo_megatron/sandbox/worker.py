"""A worker process of pool.py: loads a handler, then answers one request after another.

Run as a script; imports nothing of the package itself. A message is a 4-byte length and its bytes:
requests, on stdin, are pickled by the parent; replies, on stdout, are JSON, because a handler may
run code that is not trusted. The first request is the set-up:

    {"sys_path": [...], "handler": "module:function", "options": {...}, "timeout_seconds": 5.0,
     "memory_bytes": 1 << 30}

`function(**options)` returns (handle, about). The first reply is {"ready": about}, or {"refused":
traceback} if that raised. Each further request is passed to `handle`, whose dict is the reply. An
exception is {"error": traceback}; a MemoryError is {"out_of_memory": true}, and the worker exits.

Its parent kills it when a request takes too long; if the parent is gone, its own timer does so a
little later.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

HEADER = struct.Struct(">I")


MAX_ERROR_LINES, MAX_LINE_CHARACTERS = 100, 1000
"""Of a traceback, the last lines, and what each begins with: a message may be a whole document."""

Handle = Callable[[Any], dict[str, Any]]


class Loaded(NamedTuple):
    """What a set-up has loaded."""

    handle: Handle
    timeout_seconds: float
    memory_bytes: int


def main() -> None:
    """Answer until stdin ends."""
    with own_pipes() as (requests, output):
        about, loaded = load(requests, output)
        if loaded is not None:
            limit_memory(loaded.memory_bytes)
            send(output, {"ready": about})
            serve(loaded, requests, output)


@contextlib.contextmanager
def own_pipes() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Take stdin and stdout away from whatever runs here -> (requests, replies)."""
    ignore_signals()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(os.dup(1), "wb") as output, os.fdopen(os.dup(0), "rb") as requests:
        # What a handler prints must not mix with the messages, nor can it read them.
        os.dup2(2, 1)
        with open(os.devnull) as null:
            os.dup2(null.fileno(), 0)
        yield requests, output


def ignore_signals() -> None:
    """A job's signals reach every process; this one ends when its parent closes the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def load(requests: BinaryIO, output: BinaryIO) -> tuple[dict[str, Any], Loaded | None]:
    """Load what the set-up names -> what it says of itself, and it; None: that was refused."""
    setup = receive(requests)
    if setup is None:
        return {}, None
    try:
        sys.path[:] = setup["sys_path"]
        module, _, function = setup["handler"].partition(":")
        make = getattr(importlib.import_module(module), function)
        handle, about = make(**setup["options"])
    except BaseException:
        send(output, {"refused": traceback.format_exc()})
        return {}, None
    return about, Loaded(handle, setup["timeout_seconds"], setup["memory_bytes"])


def limit_memory(extra_bytes: int) -> None:
    """Limit the address space to what is in use now and `extra_bytes` more."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes, used + extra_bytes))


def serve(loaded: Loaded, requests: BinaryIO, output: BinaryIO) -> None:
    """Answer until the requests end, or memory does."""
    while (request := receive(requests)) is not None:
        signal.setitimer(signal.ITIMER_REAL, 2 * loaded.timeout_seconds + 1)
        reply = _reply(loaded.handle, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(output, reply)
        if "out_of_memory" in reply:
            return


def _reply(handle: Handle, request: Any) -> dict[str, Any]:
    try:
        return handle(request)
    except MemoryError:
        return {"out_of_memory": True}
    except BaseException:  # A verifier's sys.exit() too costs one verdict, not the worker.
        lines = traceback.format_exc().splitlines()[-MAX_ERROR_LINES:]
        return {"error": "\n".join(line[:MAX_LINE_CHARACTERS] for line in lines)}


def send(stream: BinaryIO, message: dict[str, Any]) -> None:
    """Write one message."""
    data = json.dumps(message).encode()
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Read one message; None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return pickle.loads(stream.read(HEADER.unpack(header)[0]))


if __name__ == "__main__":
    main()

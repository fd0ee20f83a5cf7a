"""Forks the sandbox's processes: the interpreter and its modules are loaded once, here.

Run as a script, with the number of a socket. A message is JSON; the files that come with it are
those of the process to fork. No program text, input or test passes through this process, because
forked processes could read it from inherited memory.

    {"modules": [...], "path": [...],                      {"ready": Confinement.refusal} or
     "max_integer_digits": N}                              {"refused": text}
    {"role": "run", "cpu_seconds": 3, "memory_bytes": N}   {"process": id}
    {"end": id, "grace_seconds": 0.5}                      {"exit": -9, "cpu_seconds": 0.02}

It ends, with all its processes, when the socket closes.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

MAX_FILES, MESSAGE_BYTES = 8, 1 << 16


def main(number: int) -> None:
    """Serve until the socket closes."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    with socket.socket(fileno=number) as worker:
        setup = json.loads(worker.recv(MESSAGE_BYTES))
        try:
            confinement = _load(setup)
        except Exception as error:
            worker.send(json.dumps({"refused": f"{type(error).__name__}: {error}"}).encode())
            return
        worker.send(json.dumps({"ready": confinement.refusal}).encode())
        alive: set[int] = set()
        try:
            while True:
                message, files, _, _ = socket.recv_fds(worker, MESSAGE_BYTES, MAX_FILES)
                if not message:
                    return
                request = json.loads(message)
                if "role" in request:
                    process = _fork(request, files, confinement)
                    alive.add(process)
                    reply: dict[str, Any] = {"process": process}
                else:
                    alive.remove(request["end"])
                    reply = _end(request["end"], request["grace_seconds"])
                worker.send(json.dumps(reply).encode())
        finally:
            for process in alive:
                _end(process, 0.0)


def _load(setup: dict[str, Any]) -> Any:
    from vapo_megatron.sandbox import inside  # noqa: F401
    from vapo_megatron.sandbox.confinement import Confinement
    from vapo_megatron.sandbox.modules import STANDARD_MODULES

    sys.path[1:1] = setup["path"]
    for module in STANDARD_MODULES:
        # Which of them there are depends on how Python was built.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    for module in setup["modules"]:
        importlib.import_module(module)
    sys.set_int_max_str_digits(setup["max_integer_digits"])
    time.tzset()  # Reads its file now.
    os.environ.clear()
    # A directory in which there is nothing, and nothing can be made.
    empty = tempfile.mkdtemp()
    os.chdir(empty)
    os.rmdir(empty)
    atexit._clear()
    gc.collect()
    gc.freeze()  # So that a forked process's collections do not copy all pages.
    return Confinement()


def _fork(request: dict[str, Any], files: list[int], confinement: Any) -> int:
    from vapo_megatron.sandbox import inside
    from vapo_megatron.sandbox.confinement import Limits

    process = os.fork()
    if process:
        for file in files:
            os.close(file)
        return process
    code = 1
    try:
        limits = Limits(request["cpu_seconds"], request["memory_bytes"])
        confinement.enter(files, limits)
        getattr(inside, request["role"])()
        code = 0
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(code)


def _exit_code(error: SystemExit) -> int:
    if isinstance(error.code, int | None):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _end(process: int, grace_seconds: float) -> dict[str, Any]:
    """Kill a process that does not end by itself; wait for its end, and say how it was."""
    deadline = time.monotonic() + grace_seconds
    pause = 0.0002
    ended, status, usage = os.wait4(process, os.WNOHANG)
    while not ended:
        if time.monotonic() >= deadline:
            os.kill(process, signal.SIGKILL)
            ended, status, usage = os.wait4(process, 0)
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
        ended, status, usage = os.wait4(process, os.WNOHANG)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return {"exit": os.waitstatus_to_exitcode(status), "cpu_seconds": cpu_seconds}


if __name__ == "__main__":
    main(int(sys.argv[1]))

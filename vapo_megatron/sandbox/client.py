"""Starts confined processes through a template, feeds them, and reads what they answer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from vapo_megatron.sandbox.plain_values import MAX_INTEGER_DIGITS, encode
from vapo_megatron.sandbox.template import MESSAGE_BYTES

START_SECONDS = 120.0
WALL_FACTOR = 3
MAX_ERROR_BYTES = 1 << 14
"""Of standard error, which is for people, the last bytes."""

# What must not work in there; the last line is for the case that nothing ran at all.
_PROBE = """
import os, socket
for attempt in (os.fork, socket.socket, lambda: open("/proc/self/status"), lambda: os.kill(1, 0)):
    try:
        attempt()
        print(attempt)
    except OSError:
        pass
print("confined")
"""


class SandboxUnavailable(Exception):
    """This machine cannot confine a process; the message says why."""


@dataclasses.dataclass(frozen=True)
class Budget:
    """What running one test may take."""

    cpu_seconds: float
    memory_bytes: int
    output_bytes: int

    @property
    def wall_seconds(self) -> float:
        """Longer than the CPU time, because the machine has other work, but not endless."""
        return WALL_FACTOR * self.cpu_seconds + 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a program's process, or those of its test, ended."""

    output: bytes
    failure: str
    """Empty: it ended by itself with exit code 0."""
    cpu_seconds: float
    errors: bytes
    """The last that was written to standard error, the program's before its test's."""


class Sandbox:
    """A template process, and one confined process after the other; a context manager.

    Args:
        modules: what programs can import beside the standard library.

    Raises:
        SandboxUnavailable: on entering: the kernel does not confine, or a module is missing.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = list(modules)
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.refusal = ""
        """Why programs run as root in spite of all; empty: they do not."""

    def start(self) -> None:
        """Start the template, and see whether it confines."""
        own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Nothing of this process's environment: a program finds in its memory how it was started.
        environment = {
            name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ
        }
        environment |= {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
        environment |= {f"{x}_NUM_THREADS": "1" for x in ("OMP", "OPENBLAS", "MKL")}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("template.py")), str(its.fileno())],
            stdin=subprocess.DEVNULL, pass_fds=[its.fileno()], env=environment,
        )  # fmt: skip
        its.close()
        own.settimeout(START_SECONDS)
        self._socket = own
        path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        setup = {
            "modules": self._modules,
            "path": [os.path.abspath(entry) for entry in path],
            "max_integer_digits": MAX_INTEGER_DIGITS,
        }
        reply = self._exchange(setup)
        if "refused" in reply:
            raise SandboxUnavailable(reply["refused"])
        self.refusal = reply["ready"]
        probe = self.run(_PROBE, "", Budget(10.0, 1 << 28, 1 << 16))
        if (probe.output, probe.failure) != (b"confined\n", ""):
            raise SandboxUnavailable(
                "the kernel does not refuse what a program must not do: "
                f"{probe.failure or probe.output.decode()}; seccomp filters (Linux on x86_64 or "
                "aarch64) are needed"
            )

    def close(self) -> None:
        """End the template and its processes."""
        if self._process is not None and self._socket is not None:
            self._socket.close()
            self._process.kill()
            self._process.wait()
            self._process = self._socket = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, program: str, text: str, budget: Budget) -> Outcome:
        """Run a program as a script with a standard input -> its standard output."""
        with self._with_template(), _Files() as files:
            (output, writes), (errors, complains) = files.pipe(), files.pipe()
            given = [files.holding(text), writes, complains, _to_run(files, program)]
            process = self._fork("run", budget, given)
            files.close(given)
            return self._collect(output, {process: errors}, budget)

    def call(
        self,
        program: str,
        function: str,
        arguments: Sequence[Any],
        budget: Budget,
        given: str = "",
    ) -> Outcome:
        """Call a function of a program once -> its reply, as inside.py has it.

        given: the row's own code, which runs before the program.
        """
        call = {"call": function, "arguments": encode(list(arguments)), "keywords": encode({})}
        with self._with_template(), _Files() as files:
            (output, replies), (errors, complains) = files.pipe(), files.pipe()
            its = [files.null(), files.null(), complains, _to_run(files, program, given)]
            its += [files.holding(json.dumps(call)), replies]
            process = self._fork("serve", budget, its)
            files.close(its)
            return self._collect(output, {process: errors}, budget)

    def test(
        self,
        program: str,
        test: str,
        budget: Budget,
        functions: Collection[str],
        given: str = "",
    ) -> Outcome:
        """Run a test in one process, and the program that it calls in another.

        Args:
            program: its text.
            test: the test's.
            budget: of each process.
            functions: the program's, by the names that the test has for them.
            given: the row's own code, which runs before each of the two.

        Returns:
            Its output is inside.PASSED if the test ran to its end.
        """
        with self._with_template(), _Files() as files:
            (result, writes), (errors, complains) = files.pipe(), files.pipe()
            program_errors, program_complains = files.pipe()
            (calls, asks), (replies, answers) = files.pipe(), files.pipe()
            its = [files.null(), files.null(), program_complains]
            its += [_to_run(files, program, given), calls, answers]
            serving = self._fork("serve", budget, its)
            for_test = [files.null(), files.null(), complains]
            for_test += [_to_run(files, test, given, functions)]
            for_test += [replies, asks, writes]
            testing = self._fork("test", budget, for_test)
            files.close([*its, *for_test])
            errors_of = {testing: errors, serving: program_errors}
            return self._collect(result, errors_of, budget)

    @contextlib.contextmanager
    def _with_template(self) -> Iterator[None]:
        """Start a template that has died; after an error, end it with whatever it has forked."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self.start()
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _exchange(self, request: Mapping[str, Any], files: Sequence[int] = ()) -> dict[str, Any]:
        assert self._socket is not None, "the template runs"
        self._socket.settimeout(START_SECONDS + request.get("grace_seconds", 0.0))
        reply = b""
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            reply = self._socket.recv(MESSAGE_BYTES)
        if not reply:
            raise SandboxUnavailable("the sandbox's template has died; its error is above")
        return json.loads(reply)

    def _fork(self, role: str, budget: Budget, files: Sequence[int]) -> int:
        request = {
            "role": role,
            "cpu_seconds": math.ceil(budget.cpu_seconds),
            "memory_bytes": budget.memory_bytes,
        }
        return self._exchange(request, files)["process"]

    def _collect(self, output: int, errors: Mapping[int, int], budget: Budget) -> Outcome:
        """Read until the first process closes its files, or must end; then end all.

        Args:
            output: of the first process.
            errors: process -> its standard error.
            budget: of each process.
        """
        deadline = time.monotonic() + budget.wall_seconds
        received = {output: bytearray()} | {file: bytearray() for file in errors.values()}
        open_files = {output, next(iter(errors.values()))}
        poll = select.poll()
        for file in received:
            poll.register(file, select.POLLIN)
        failure = ""
        while open_files and not failure:
            for file, _ in poll.poll(1000 * max(deadline - time.monotonic(), 0.0)):
                data = os.read(file, 1 << 16)
                received[file] += data
                if not data:
                    poll.unregister(file)
                    open_files.discard(file)
                elif file != output:
                    del received[file][:-MAX_ERROR_BYTES]
            if len(received[output]) > budget.output_bytes:
                failure = f"more than {budget.output_bytes} bytes of output"
            elif time.monotonic() >= deadline:
                failure = f"more than {budget.wall_seconds:g} seconds"
        ends: list[dict[str, Any]] = []
        for process in errors:
            # The first may need a moment to exit; what else there is was there for it alone.
            grace = 0.0 if failure or ends else max(deadline - time.monotonic(), 0.0)
            ends.append(self._exchange({"end": process, "grace_seconds": grace}))
        used = [end["cpu_seconds"] for end in ends]
        # What a program says of its failure, before what its test says of that.
        told = b"\n".join(received[file].strip() for file in errors.values()).strip()
        failure = failure or _failure(ends[0]["exit"], max(used), told, budget)
        return Outcome(bytes(received[output]), failure, sum(used), told)


def _failure(exit_code: int, cpu_seconds: float, errors: bytes, budget: Budget) -> str:
    if cpu_seconds > budget.cpu_seconds or exit_code == -signal.SIGXCPU:
        return f"more than {budget.cpu_seconds:g} seconds of CPU time"
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    if exit_code > 0:
        last = errors.decode(errors="replace").rpartition("\n")[2]
        return last[:200] or f"exit code {exit_code}"
    return ""


def _to_run(files: _Files, text: str, given: str = "", functions: Collection[str] = ()) -> int:
    """Return a file for a process's TEXT; see inside.py."""
    # Half a surrogate pair is no text of Python.
    text, given = (each.encode("utf-8", "replace").decode() for each in (text, given))
    content = {"text": text, "given": given, "functions": sorted(functions)}
    return files.holding(json.dumps(content))


class _Files:
    """Files to give away; what is still open is closed at the end."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def pipe(self) -> tuple[int, int]:
        """Return (reading end, writing end)."""
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def null(self) -> int:
        """Return an empty file, in which what is written is lost."""
        return self._kept(os.open(os.devnull, os.O_RDWR))

    def holding(self, text: str) -> int:
        """Return a file in memory with a text; programs expect a regular file to read from."""
        file = self._kept(os.memfd_create("text"))
        with open(file, "wb", closefd=False) as stream:
            stream.write(text.encode("utf-8", "replace"))
        os.lseek(file, 0, os.SEEK_SET)
        return file

    def close(self, files: Sequence[int]) -> None:
        """Close what has been given away."""
        for file in self._open.intersection(files):
            os.close(file)
            self._open.remove(file)

    def _kept(self, file: int) -> int:
        self._open.add(file)
        return file

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(list(self._open))

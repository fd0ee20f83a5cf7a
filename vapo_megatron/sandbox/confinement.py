"""Irrevocably drops every privilege that a forked process's program does not need."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import resource
import signal
from collections.abc import Callable, Sequence
from typing import Any

from vapo_megatron.sandbox.system_calls import SystemCallFilter

MAX_THREADS = 64
STACK_BYTES = 100 << 20
"""Of the main thread, for deep recursion; mmap leaves at least 128 MB below a stack free."""
# What systemd gives to services without a user of their own: no person has one of these.
_FIRST_USER, _LAST_USER = 61184, 65519
_SET_PARENT_DEATH_SIGNAL = 1
_CLEAR_OF_STANDARD_FILES = 64


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a process may use."""

    cpu_seconds: int
    memory_bytes: int
    """Of address space, beyond what the template has loaded."""


class Confinement:
    """Prepared once in the template, entered in each process that is forked from it.

    As root, processes run as a user that owns nothing: RLIMIT_NPROC does not bind root. Where the
    container does not let it change its user, and for any other user, they run as itself. As root,
    they also have the empty working directory as their root directory, where the container allows
    that.
    """

    def __init__(self) -> None:
        self._filter = SystemCallFilter()
        with open("/proc/self/statm") as file:
            self._loaded_bytes = int(file.read().split()[0]) * resource.getpagesize()
        self._template = os.getpid()
        self.user: int | None = _FIRST_USER + os.getpid() % (_LAST_USER - _FIRST_USER + 1)
        """None: its own."""
        is_root = os.geteuid() == 0
        self.refusal = _refusal(_change_user, self.user) if is_root else ""
        """Why root cannot change its user; empty: it can, or need not."""
        if self.refusal or not is_root:
            self.user = None
        self._hides_files = is_root and not _refusal(os.chroot, ".")

    def enter(self, files: Sequence[int], limits: Limits) -> None:
        """Confine this process, whose only files become 0, 1, ... in the order given.

        Raises:
            OSError: the kernel refuses a step; the process must end.
        """
        os.setsid()
        _keep_only(files)
        self._set_limits(limits)
        if self._hides_files:
            os.chroot(".")
        if self.user is not None:
            _change_user(self.user)
        # After the change of user, which would clear it.
        self._filter.control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != self._template:
            raise OSError("the template has died")
        self._filter.set()

    def _set_limits(self, limits: Limits) -> None:
        memory = self._loaded_bytes + limits.memory_bytes
        if self.user is not None:
            threads = MAX_THREADS
        else:
            # All of a user's threads count, and nothing says cheaply how many these are: no more
            # than there are on the machine.
            with open("/proc/loadavg") as file:
                threads = int(file.read().split()[3].partition("/")[2]) + MAX_THREADS
        for what, soft, hard in (
            (resource.RLIMIT_CPU, limits.cpu_seconds, limits.cpu_seconds + 1),
            (resource.RLIMIT_AS, memory, memory),
            (resource.RLIMIT_NPROC, threads, threads),
            (resource.RLIMIT_STACK, STACK_BYTES, resource.RLIM_INFINITY),
            (resource.RLIMIT_FSIZE, 0, 0),
            (resource.RLIMIT_CORE, 0, 0),
            (resource.RLIMIT_MEMLOCK, 0, 0),
            (resource.RLIMIT_NOFILE, 16, 16),
        ):
            _, highest = resource.getrlimit(what)
            hard = _lower(hard, highest)
            resource.setrlimit(what, (_lower(soft, hard), hard))


def _lower(first: int, second: int) -> int:
    if resource.RLIM_INFINITY in (first, second):  # It is -1.
        return max(first, second)
    return min(first, second)


def _keep_only(files: Sequence[int]) -> None:
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, _CLEAR_OF_STANDARD_FILES) for file in files]
    for number, file in enumerate(moved):
        os.dup2(file, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number >= len(files):
            with contextlib.suppress(OSError):  # The directory itself was among them.
                os.close(number)


def _change_user(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _refusal(attempt: Callable[[Any], None], value: Any) -> str:
    """Return why a call fails in a process forked from here; empty: it works."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            attempt(value)
        except OSError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        refusal = pipe.read()
    os.waitpid(child, 0)
    return refusal

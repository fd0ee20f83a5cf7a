"""The system calls that a program of the sandbox may make; the kernel refuses all others.

A seccomp filter needs no privilege and works inside containers. What it allows is enough for
Python code that is loaded already: memory, threads, clocks, and the files that are open. Not among
it are opening files, sockets, new processes, signals, and raising limits or privileges.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Iterator
from typing import Any

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> (its AUDIT_ARCH, its column below)."""

ALLOWED = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66),
    "pread64": (17, 67), "lseek": (8, 62), "close": (3, 57), "fstat": (5, 80),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "mremap": (25, 216),
    "brk": (12, 214), "madvise": (28, 233), "futex": (202, 98),
    "set_robust_list": (273, 99), "rseq": (334, 293), "restart_syscall": (219, 128),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132), "setitimer": (38, 103), "getitimer": (36, 102), "alarm": (37, None),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169),
    "time": (201, None), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getrandom": (318, 278),
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getcwd": (79, 17),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getrusage": (98, 165), "times": (100, 153), "sysinfo": (99, 179), "uname": (63, 160),
    "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
"""Name -> number for each column of ARCHITECTURES; None: there is none."""

_EQUAL, _HAS_BIT = 0x15, 0x45  # BPF_JMP | BPF_K | BPF_JEQ, and BPF_JSET
ALLOWED_IF = {
    "clone": ((56, 220), 0, _HAS_BIT, 0x10000),  # CLONE_THREAD: a thread, no process
    "prlimit64": ((302, 261), 0, _EQUAL, 0),  # its own limits, which it cannot raise
    # AT_EMPTY_PATH: fstat() in several versions of the C library. What else has this flag, made by
    # hand, ends at the confinement's own root directory.
    "newfstatat": ((262, 79), 3, _HAS_BIT, 0x1000),
    "fcntl": ((72, 25), 1, _EQUAL, 1030),  # F_DUPFD_CLOEXEC; others can send signals
}
"""Name -> (numbers, index of an argument, comparison, value): its lower 32 bits must compare so."""

CLONE3 = 435
"""It hides its flags in memory; where it is missing, the C library calls clone."""

_LOAD, _RETURN = 0x20, 0x06  # BPF_LD | BPF_W | BPF_ABS, and BPF_RET | BPF_K
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2


class SystemCallFilter:
    """The filter, ready to be set in a forked process.

    Raises:
        OSError: it is not known for this machine.
    """

    def __init__(self) -> None:
        machine = platform.machine()
        if machine not in ARCHITECTURES:
            raise OSError(
                f"no list of system calls for {machine}; there is one for x86_64, aarch64"
            )
        program = [struct.pack("=HBBI", *step) for step in _program(*ARCHITECTURES[machine])]
        self._instructions = ctypes.create_string_buffer(b"".join(program))
        # struct sock_fprog, with its padding.
        self._filter = struct.pack("@HP", len(program), ctypes.addressof(self._instructions))
        self._libc = ctypes.CDLL(None, use_errno=True)

    def set(self) -> None:
        """Set it for this process and its threads, for good. Raises OSError."""
        self.control(_SET_NO_NEW_PRIVS, 1)
        self.control(_SET_SECCOMP, _MODE_FILTER, self._filter)

    def control(self, option: int, *arguments: Any) -> None:
        """Call prctl, with integers or bytes. Raises OSError."""
        given = [a if isinstance(a, bytes) else ctypes.c_ulong(a) for a in arguments]
        missing = [ctypes.c_ulong(0)] * (4 - len(given))
        if self._libc.prctl(option, *given, *missing):
            number = ctypes.get_errno()
            raise OSError(number, f"prctl({option}): {errno.errorcode.get(number)}")


def _program(architecture: int, column: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (code, jump if true, jump if false, operand)."""
    # The same number is another call in another convention, such as that of 32-bit programs.
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _EQUAL, 1, 0, architecture
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    for each in ALLOWED.values():
        number = each[column]
        if number is not None:
            yield _EQUAL, 0, 1, number
            yield _RETURN, 0, 0, _ALLOW
    for numbers, index, comparison, value in ALLOWED_IF.values():
        yield _EQUAL, 0, 4, numbers[column]
        yield _LOAD, 0, 0, _ARGUMENTS + 8 * index
        yield comparison, 0, 1, value
        yield _RETURN, 0, 0, _ALLOW
        yield _RETURN, 0, 0, _ERROR | errno.EPERM
    yield _EQUAL, 0, 1, CLONE3
    yield _RETURN, 0, 0, _ERROR | errno.ENOSYS
    yield _RETURN, 0, 0, _ERROR | errno.EPERM

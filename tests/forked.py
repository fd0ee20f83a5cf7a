"""In the place of the interpreter that xdist starts its processes with: they are forked.

xdist starts each as `python -u -c LINE`. With `python -m tests.forked` for python, a process forked
from the server that all share runs the line, with the files and the environment that it was started
with: what the tests import has been imported once, by the server.
"""

import os
import sys
from multiprocessing.reduction import DupFd

from tests.workers import context, join, keep_imported


class _File:
    """An open file of this process; for the forked one, the number that it has there."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self):
        return _received, (DupFd(self._number),)


def _received(file) -> int:
    return file.detach()


def _run(line: str, files: list[int], environment: dict[str, str]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    keep_imported()
    sys.stdin = open(0, closefd=False)
    os.environ.update(environment)
    exec(line, {"__name__": "__main__"})


def main() -> int:
    """Last as long as the forked process."""
    join()
    files = [_File(number) for number in range(3)]
    process = context().Process(target=_run, args=(sys.argv[-1], files, dict(os.environ)))
    process.start()
    for number in range(3):
        os.close(number)
    process.join()
    return process.exitcode


if __name__ == "__main__":
    sys.exit(main())

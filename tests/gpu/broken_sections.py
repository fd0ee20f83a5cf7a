"""Sections of tools/gpu_smoke.py that go wrong, each in its way, and one that does not."""

import os
import signal
import time

from tools.smoke.report import Row, skipped


def fine(sizes, directory, name):
    return [Row("fine", name, f"{sizes.load.num_responses} responses", figures={"seconds": 1.5})]


def raises(sizes, directory):
    raise RuntimeError("CUDA error: out of | memory\nand a second line")


def crashes(sizes, directory):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(sizes, directory):
    time.sleep(600)


def crashes_half_way(sizes, directory):
    yield Row("half", "first", "done")
    os.kill(os.getpid(), signal.SIGKILL)


def one_rank_raises(sizes, directory):
    """The other, which has a row by then, waits for it, as in a collective."""
    has_row = directory / "has_row"
    if os.environ["RANK"] == "0":
        yield Row("ranks", "first", f"{os.environ['WORLD_SIZE']} ranks")
        has_row.touch()
        time.sleep(600)
    while not has_row.exists():
        time.sleep(0.05)
    raise RuntimeError("NCCL error")


def lacks(sizes, directory):
    return [skipped("lacks", "no such library")]


def leaves(sizes, directory):
    (directory / "left").touch()
    return []


def finds(sizes, directory):
    return [Row("finds", "", str((directory / "left").exists()))]

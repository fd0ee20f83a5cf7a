"""Sections of tools/gpu_smoke.py that go wrong, each in its way, and one that does not."""

import os
import signal
import time

from tools.smoke.report import Row


def fine(sizes, directory, name):
    return [Row("fine", name, f"{sizes.load.num_responses} responses", figures={"seconds": 1.5})]


def raises(sizes, directory):
    raise RuntimeError("CUDA error: out of | memory\nand a second line")


def crashes(sizes, directory):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(sizes, directory):
    time.sleep(600)

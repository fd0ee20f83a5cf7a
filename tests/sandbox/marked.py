"""Processes that are known by a variable of their environment, which their children inherit."""

import contextlib
import time

import psutil


def marked(mark):
    """Return those that run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if mark in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def gone(mark, but=0):
    """Wait until no more than so many are left -> whether that came true."""
    end = time.monotonic() + 60
    while len(marked(mark)) > but and time.monotonic() < end:
        time.sleep(0.05)
    return len(marked(mark)) <= but

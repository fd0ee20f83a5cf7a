"""torchrun and all that comes of it, watched from outside."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time

import psutil

from tests.e2e.test_run import ROOT, environment
from vapo_megatron.run.checkpoint.files import LATEST, STATE


class Started:
    """torchrun, or a recipe that becomes it, and all that comes of it."""

    def __init__(self, command, log, run_dir, **more):
        self.log, self.metrics = log, run_dir / "metrics.jsonl"
        with log.open("w") as file:
            self.launcher = subprocess.Popen(
                list(map(str, command)), cwd=ROOT, env={**environment(), **more},
                stdout=file, stderr=file,
            )  # fmt: skip
        self.seen = set()

    def wait_for(self, is_so):
        """Until then, and note every process."""
        deadline = time.monotonic() + 280
        while not is_so():
            assert self.launcher.poll() is None and time.monotonic() < deadline, self.said()
            self.look()
            time.sleep(0.1)

    def look(self):
        """Note every process."""
        self.seen |= set(psutil.Process(self.launcher.pid).children(recursive=True))

    def rows(self):
        """How many have been written."""
        return len(self.metrics.read_text().splitlines()) if self.metrics.exists() else 0

    def ranks(self):
        """The processes that torchrun has started, by rank."""
        found = {}
        for process in psutil.Process(self.launcher.pid).children():
            with contextlib.suppress(psutil.Error):  # It may have ended.
                if rank := process.environ().get("RANK"):
                    found[int(rank)] = process.pid
        return found

    def end(self):
        """Wait for the end; return the exit code. Nothing is left behind."""
        deadline = time.monotonic() + 280
        while self.launcher.poll() is None:
            assert time.monotonic() < deadline, self.said()
            self.look()
            time.sleep(0.5)
        deadline = time.monotonic() + 15
        while left := [process for process in self.seen if lives(process)]:
            assert time.monotonic() < deadline, f"{left} live on"
            time.sleep(0.1)
        return self.launcher.returncode

    def said(self):
        """The end of what was printed."""
        return self.log.read_text()[-6000:]


def kill_tree(process):
    """End a process and its children at once: torchrun's have sessions of their own."""
    found = psutil.Process(process.pid)
    for each in (*found.children(recursive=True), found):
        with contextlib.suppress(psutil.NoSuchProcess):  # It has ended meanwhile.
            each.kill()
    psutil.wait_procs([found], 30)


def kill_once(is_so, command, log):
    """Start a command, and kill it then."""
    with log.open("w") as file:
        process = subprocess.Popen(
            list(map(str, command)), cwd=ROOT, env=environment(), stdout=file, stderr=file
        )
    deadline = time.monotonic() + 280
    while not is_so():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.005)
    kill_tree(process)


def lives(process):
    """False also of one that has ended and that nobody has asked for yet, its parent being dead."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def updates(checkpoint):
    """That its roles have had."""
    return sum(json.loads((checkpoint / STATE).read_text())["num_updates"].values())


def last_updates(run_dir):
    """The same of a run's latest checkpoint."""
    root = run_dir / "checkpoints"
    return updates(root / (root / LATEST).read_text())

"""torchrun and all that comes of it, watched from outside."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from pathlib import Path

from tests.e2e.test_run import ROOT, environment
from vapo_megatron.parallel.health.processes import descendants
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
        self.seen |= set(descendants(self.launcher.pid))

    def rows(self):
        """How many have been written."""
        return len(self.metrics.read_text().splitlines()) if self.metrics.exists() else 0

    def ranks(self):
        """The processes that torchrun has started, by rank."""
        found = {}
        for process in descendants(self.launcher.pid):
            with contextlib.suppress(OSError):  # It may have ended.
                stat = Path(f"/proc/{process}/stat").read_bytes()
                environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                is_child = int(stat.rpartition(b")")[2].split()[1]) == self.launcher.pid
                numbers = [int(v[5:]) for v in environment if v.startswith(b"RANK=")]
                if is_child and numbers:
                    found[numbers[0]] = process
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


def lives(process):
    """False also of one that has ended and that nobody has asked for yet, its parent being dead."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def updates(checkpoint):
    """That its roles have had."""
    return sum(json.loads((checkpoint / STATE).read_text())["num_updates"].values())


def last_updates(run_dir):
    """The same of a run's latest checkpoint."""
    root = run_dir / "checkpoints"
    return updates(root / (root / LATEST).read_text())

"""A whole run whose disk is full: it says so, and goes on from its checkpoint when there is room.

The disk is a small tmpfs; where mounting is not permitted no file may become large, which the first
checkpoint meets. What is written beside checkpoints meets one in tests/test_odd_batches.py and
tests/parallel/health/test_watchdog.py.
"""

import errno
import os
import resource
import shutil
import subprocess

import pytest

from tests import faults
from tests.dumped import MODEL, dump
from tests.launched import Launched
from tests.parallel.health.test_early_stop import comparable
from tests.run.checkpoint.test_writer import small_disk
from tests.weights.tiny_hf import write_tiny_hf

MOUNT_BYTES, FILE_BYTES = 1 << 30, 20_000


def train(limit, *arguments):
    """Make the run, in a process whose files may have so many bytes; None: any."""
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return faults.train(*arguments)


@pytest.mark.slow
def test_a_run_whose_disk_is_full_says_so_and_goes_on_when_there_is_room(workers, tmp_path):
    hf = write_tiny_hf(tmp_path / "model", **MODEL)
    workers.run(2, dump, tmp_path / "replay", [1, 2, 3], 2)
    sections = {
        "checkpoint": {"every_steps": 1, "keep_last": 3},
        "timeouts": {"silence_seconds": 20},
    }

    def run(run_dir, limit=None):
        given = limit, hf, tmp_path / "replay", run_dir, sections, None
        return Launched(train, *given, world_size=2).wait()

    whole = tmp_path / "whole"
    assert run(whole).returncode == 0
    sizes = [sum(p.stat().st_size for p in s.rglob("*")) for s in whole.glob("checkpoints/step_*")]
    assert len(sizes) == 3
    disk = tmp_path / "disk"
    disk.mkdir()
    # One checkpoint fits, with what is written beside it, and the second does not.
    with small_disk(disk, int(1.5 * max(sizes))) as is_limited:
        done = run(disk / "run", FILE_BYTES if is_limited else None)
        assert done.returncode == 2, done.stderr
        # The checkpoint, or what the steps write in the meantime, meets it first.
        told = {line for line in done.stderr.splitlines() if line.startswith("error:")}
        reason = os.strerror(errno.EFBIG if is_limited else errno.ENOSPC)
        assert told and all(f" cannot be written: {reason}" in line for line in told)
        assert all("resumes from" in line for line in told)
        assert "Traceback" not in done.stderr
        if not is_limited:
            larger = ["mount", "-o", f"remount,size={MOUNT_BYTES}", str(disk)]
            subprocess.run(larger, check=True)
        done = run(disk / "run")
        assert done.returncode == 0, done.stderr
        assert ("resumed" in done.stdout) != is_limited
        assert comparable(disk / "run") == comparable(whole)
        shutil.rmtree(disk / "run")

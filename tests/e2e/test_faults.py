"""Whole runs under torchrun, with vLLM and verifier processes, that are signalled or lose a rank.

Seeded moments all over a run are tests/run_faults.sh's. Not exercised: several nodes.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.test_run import (
    ON_TWO,
    RECIPE,
    ROOT,
    SMALL,
    TINY,
    base_model,
    environment,
    rows,
    run,
    torchrun,
)
from tests.workers import free_port
from vapo_megatron.process_tree import descendants

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A model and problems, as overrides, for four steps with a checkpoint after each."""
    out = tmp_path_factory.mktemp("given")
    sizes = ("--train", "200", "--test", "24", "--seed", "0")
    run([environment()["VAPO_PYTHON"], "examples/tiny/task.py", "--out", out / "data", *sizes])
    return [
        *SMALL, *ON_TWO, base_model(out / "base", 30), f"data.train_path={out}/data/train.jsonl",
        f"evaluation.path={out}/data/test.jsonl", "checkpoint.every_steps=1",
    ]  # fmt: skip


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
            self.seen |= set(descendants(self.launcher.pid))
            time.sleep(0.05)

    def rows(self):
        return len(self.metrics.read_text().splitlines()) if self.metrics.exists() else 0

    def rank(self, rank):
        """The process that torchrun has started as this rank."""
        for process in descendants(self.launcher.pid):
            stat = Path(f"/proc/{process}/stat").read_text()
            own = f"RANK={rank}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(
                b"\0"
            )
            if own and int(stat.rpartition(")")[2].split()[1]) == self.launcher.pid:
                return process
        raise AssertionError(f"no rank {rank}")

    def end(self):
        """Wait for the end; return the exit code. Nothing is left behind."""
        code = self.launcher.wait(280)
        deadline = time.monotonic() + 15
        while left := [p for p in self.seen if Path(f"/proc/{p}").exists()]:
            assert time.monotonic() < deadline, f"{left} live on"
            time.sleep(0.1)
        return code

    def said(self):
        return self.log.read_text()[-6000:]


def test_torchrun_starts_a_run_anew_whose_rank_was_killed(given, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    command = ["-m", "vapo_megatron.train", "--config", TINY, *given]
    run(torchrun(*command, f"logging.run_dir={whole}"))
    # Not --standalone, whose rendezvous has a new store each time.
    anew = [*torchrun()[:3], "--nproc-per-node=2", f"--master-port={free_port()}"]
    started = Started(
        [*anew, "--max-restarts=2", *command, f"logging.run_dir={cut}"], tmp_path / "log", cut
    )
    for enough in (2, 4):
        started.wait_for(lambda enough=enough: started.rows() >= enough)
        os.kill(started.rank(1), signal.SIGKILL)
        killed = time.monotonic()
        started.wait_for(lambda: started.launcher.poll() or "is dead or stopped" in started.said())
        assert time.monotonic() - killed < 30
    assert started.end() == 0, started.said()
    assert len(re.findall(r"error: rank 1 \(.*\) in .* is dead or stopped", started.said())) == 2
    assert rows(cut) == rows(whole), "as if it had never been killed"


def test_a_stopped_rank_ends_all_within_the_limit(given, tmp_path):
    run_dir = tmp_path / "run"
    limits = ["timeouts.silence_seconds=10", f"logging.run_dir={run_dir}"]
    started = Started(
        torchrun("-m", "vapo_megatron.train", "--config", TINY, *given, *limits),
        tmp_path / "log",
        run_dir,
    )
    started.wait_for(lambda: started.rows() >= 2)
    os.kill(started.rank(1), signal.SIGSTOP)
    stopped = time.monotonic()
    assert started.end() != 0
    # torchrun itself needs 30 s to kill a process that cannot answer.
    assert time.monotonic() - stopped < 60
    assert re.search(
        r"error: rank 1 \(.*\) in \S+ .*is dead or stopped, silent for", started.said()
    )
    assert re.search(r"trainer.py.* in _run\n", (run_dir / "stacks/rank_0000.txt").read_text())


def test_a_recipe_told_to_stop_ends_well_and_goes_on(given, tmp_path):
    """Its torchrun alone is signalled, while it samples, and there is no time for the step."""
    run_dir = tmp_path / "run"
    more = ["checkpoint.every_steps=0", "checkpoint.grace_seconds=0", f"logging.run_dir={run_dir}"]

    def start():
        port = {"NPROC_PER_NODE": "2", "MASTER_PORT": str(free_port())}
        command = ["bash", RECIPE, "--config", TINY, *given, *more]
        return Started(command, tmp_path / "log", run_dir, **port)

    started = start()
    started.wait_for(lambda: started.rows() >= 3)
    os.kill(started.launcher.pid, signal.SIGTERM)
    assert started.end() == 0, started.said()
    done = started.rows() - 1
    assert f"stopped by SIGTERM after step {done}; start it again" in started.said()
    latest = (run_dir / "checkpoints/latest").read_text()
    assert done in (2, 3) and latest == f"step_{done:06d}", "saved, though none was due"
    started = start()
    assert started.end() == 0, started.said()
    assert [row["step"] for row in rows(run_dir)] == [0, 1, 2, 3, 4]

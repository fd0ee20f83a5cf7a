"""A whole run that is killed in the step after a checkpoint: it has lost nothing of it.

Not exercised: the moments while a checkpoint is written, which tests/run_faults.sh has.
"""

import time

import pytest

from tests import faults
from tests.dumped import MODEL, dump
from tests.launched import Launched
from tests.parallel.health.test_early_stop import comparable
from tests.weights.tiny_hf import write_tiny_hf


def train(hf, replay, run_dir, fault):
    """Make the run; a rank is killed once a checkpoint has its name, which it waits for."""

    def killed_once_saved():
        deadline = time.monotonic() + 30
        while not (run_dir / "checkpoints/latest").exists():
            assert time.monotonic() < deadline, "nothing is saved before the step ends"
            time.sleep(0.05)
        faults.FAULTS["killed"]()

    faults.FAULTS["killed once saved"] = killed_once_saved
    return faults.train(hf, replay, run_dir, {}, fault)


@pytest.mark.slow
def test_a_checkpoint_counts_before_the_next_step_has_ended(workers, tmp_path):
    hf = write_tiny_hf(tmp_path / "model", **MODEL)
    workers.run(2, dump, tmp_path / "replay", [1, 2, 3], 2)

    def run(run_dir, fault=None):
        return Launched(train, hf, tmp_path / "replay", run_dir, fault, world_size=2).wait()

    assert run(tmp_path / "whole").returncode == 0
    done = run(tmp_path / "cut", ("killed once saved", "critic_update", 2, 1))
    assert done.returncode and "nothing is saved" not in done.stderr, done.stderr
    done = run(tmp_path / "cut")
    assert done.returncode == 0 and "after step 1" in done.stdout, done.stderr
    assert comparable(tmp_path / "cut") == comparable(tmp_path / "whole")

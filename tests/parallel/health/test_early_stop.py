"""The stop signals: blocked in children too, what there is time for, and runs that stop.

Not exercised: torchrun and vLLM (tests/e2e/test_faults.py has them), Slurm (tests/e2e/test_run.py).
"""

import signal
import subprocess
import sys

import pytest

from tests import faults, jsonl
from tests.dumped import MODEL, dump
from tests.launched import Launched
from tests.weights.tiny_hf import write_tiny_hf
from tests.whole_run import measured
from vapo_megatron.parallel.health.early_stop import SIGNALS, EarlyStop, signals_blocked

PROGRAM = """
import multiprocessing, os, signal, subprocess, sys
from vapo_megatron.parallel.health import early_stop
early_stop.block_signals()
lock = multiprocessing.get_context("spawn").Lock()  # Starts a helper process of Python's own.
child = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print('child lives')"
subprocess.run([sys.executable, "-c", child], check=True)
print(early_stop.pending_signal() or None)
os.kill(os.getpid(), signal.{name})
print(early_stop.pending_signal(), early_stop.pending_signal())
# A child that torchrun has started looks at what is pending there.
child = "import vapo_megatron.parallel.health.early_stop as e; print(e.pending_signal() or None)"
for environment in ({{}}, {{"TORCHELASTIC_RUN_ID": "none"}}):
    subprocess.run([sys.executable, "-c", child], env={{**os.environ, **environment}}, check=True)
"""


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_neither_a_process_nor_its_children_die_of_it(name):
    program = PROGRAM.format(name=name)
    done = subprocess.run([sys.executable, "-uc", program], capture_output=True, text=True)
    expected = ["child lives", "None", f"{name} {name}", "None", name]
    assert done.stdout.split("\n")[:-1] == expected, done.stderr


class Clock:
    """A clock that a test sets, and a signal that arrives at 100."""

    now = 0.0

    def __call__(self):
        return self.now

    def poll(self):
        return "SIGTERM" if self.now >= 100 else ""


TIMES = {
    "time/step_seconds": 60.0,
    "time/exchange_seconds": 4.0,
    "time/critic_update_seconds": 5.0,
    "time/actor_update_seconds": 6.0,
    "time/sync_seconds": 1.0,
    "time/evaluation_seconds": 15.0,
    "time/checkpoint_seconds": 5.0,  # The next checkpoint's copy; writing it takes longer.
}


def stopping(grace, times=TIMES, save_seconds=8.0):
    """A run whose steps take 40 s, the last 12 of them from the updates on; one began at 75."""
    clock = Clock()
    stop = EarlyStop(grace, clock.poll, clock)
    stop.record(times)
    stop.save_seconds = save_seconds
    clock.now = 75.0
    stop.begin()
    return clock, stop


@pytest.mark.parametrize(
    "grace,fits",
    # The step began at 75 and ends at 115; its checkpoint takes 8 s more.
    [(22.9, False), (23.1, True), (1000, True)],
)
def test_a_step_is_finished_if_the_last_ones_times_allow_it(grace, fits):
    clock, stop = stopping(grace)
    assert stop.has_time_to_finish() and not stop.is_signalled(), (
        "without a signal there always is time"
    )
    clock.now = 100
    assert stop.has_time_to_finish() == fits and stop.signal_name == "SIGTERM"
    # Two seconds later the step is two seconds closer to its end.
    clock.now = 102
    assert stop.has_time_to_finish() == fits


def test_a_step_that_straggles_still_has_its_updates_before_it():
    clock, stop = stopping(33)
    # Near its 40 s; 12 s of updates and 8 s for the checkpoint are to come until 133.
    assert_time_until(113, clock, stop)


def assert_time_until(moment, clock, stop):
    for now, has_time in ((100, True), (moment - 0.1, True), (moment + 0.1, False)):
        clock.now = now
        assert stop.has_time_to_finish() == has_time


# 14 s of the evaluation are left, and 8 of the checkpoint.
@pytest.mark.parametrize("grace,fits", [(10, False), (22.5, True)])
def test_an_evaluation_counts_for_itself(grace, fits):
    clock, stop = stopping(grace)
    clock.now = 99
    stop.begin()
    clock.now = 100
    assert stop.has_time_to_evaluate() == fits


def test_of_the_first_step_nothing_is_known_and_nothing_can_be_lost():
    times = {"time/evaluation_seconds": 9.0, "time/step_seconds": 9.0}
    clock, stop = stopping(30, times, save_seconds=None)
    # Half of the grace is reserved for a checkpoint of unknown duration.
    assert_time_until(115, clock, stop)


def steps(run_dir):
    return [row["step"] for row in jsonl.read(run_dir / "metrics.jsonl")]


def comparable(run_dir):
    """Rows without times, and every byte of the last checkpoint."""
    last = run_dir / "checkpoints/step_000003"
    return measured(run_dir), {
        str(p.relative_to(last)): p.read_bytes()
        for p in sorted(last.rglob("*"))
        if p.suffix in (".distcp", ".pt")
    }


@pytest.mark.slow
def test_runs_stop_in_time_and_end_as_if_they_had_not(workers, tmp_path):
    """Signalled in step 2, without time: step 1 is saved. In step 2's update: step 2 is finished.

    Signalled in the evaluation after step 3: the next run repeats it and writes its row.
    """
    hf = write_tiny_hf(tmp_path / "model", **MODEL)
    workers.run(2, dump, tmp_path / "replay", [1, 2, 3], 2)

    def run(run_dir, grace, fault=None):
        sections = {"checkpoint": {"every_steps": 0, "grace_seconds": grace}}
        given = hf, tmp_path / "replay", run_dir, sections, fault
        done = Launched(faults.train, *given, world_size=2).wait()
        assert done.returncode == 0, done.stderr
        return done.stdout

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert "stopped" not in run(whole, 30)
    told = run(cut, 0, ("signalled", "values", 2, 1))
    # The signal did not reach rank 0.
    assert "a signal to another rank after step 1; start it again" in told
    assert steps(cut) == [0, 1]
    assert (cut / "checkpoints/latest").read_text() == "step_000001"
    told = run(cut, 600, ("signalled", "critic_update", 2, 0))
    assert "stopped by SIGTERM after step 2; start it again" in told
    assert steps(cut) == [0, 1, 2]
    assert (cut / "checkpoints/latest").read_text() == "step_000002"
    told = run(cut, 30, ("has no time", "evaluation", 3, 0))
    assert "resumed" in told and "after step 3; start it again" in told
    assert steps(cut) == [0, 1, 2], "row 3 waits for its evaluation"
    assert "done" in run(cut, 30)
    assert comparable(cut) == comparable(whole)
    assert len(comparable(whole)[1]) >= 6, "both roles' files of both ranks"
    assert not list(cut.glob("stacks")) and signal.SIGTERM not in signal.sigpending()


def test_they_are_taken_again_after_a_mistake():
    def blocked():
        return signal.pthread_sigmask(signal.SIG_BLOCK, [])

    before = blocked()
    with pytest.raises(ValueError, match="a mistake"), signals_blocked():
        assert set(SIGNALS) <= blocked()
        raise ValueError("a mistake")
    assert blocked() == before

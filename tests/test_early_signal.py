"""The early signal in real processes: held back in children too, and a run that stops for it.

Not exercised: torchrun and Slurm between the signal and the run; tests/e2e/test_run.py has both.
"""

import json
import os
import signal
import subprocess
import sys
import threading

from tests.dumped import MODEL, dump
from tests.test_turns import replayed
from tests.weights.tiny_hf import write_tiny_hf
from tests.workers import free_port

PROGRAM = """
import os, signal, subprocess, sys
from vapo_megatron import early_signal
early_signal.hold_back()
child = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1); print('child lives')"
subprocess.run([sys.executable, "-c", child], check=True)
print(early_signal.is_heard())
os.kill(os.getpid(), signal.SIGUSR1)
print(early_signal.is_heard(), early_signal.is_heard())
"""


def test_neither_a_process_nor_its_children_die_of_it():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.split("\n") == ["child lives", "False", "True True", ""], done.stderr


def signalled(*arguments):
    """A run whose second rank is signalled before its first step ends."""
    from vapo_megatron import early_signal

    early_signal.hold_back()
    last = int(os.environ["RANK"]) == 1
    try:
        if last:
            # This thread alone: a worker process of the tests may have others that block nothing.
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        replayed(*arguments)
    finally:
        if last:
            signal.sigwait({signal.SIGUSR1})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def test_a_run_stops_on_all_ranks_after_its_step_and_goes_on(workers, tmp_path):
    hf, run = write_tiny_hf(tmp_path / "model", **MODEL), tmp_path / "run"
    workers.run(2, dump, tmp_path / "replay", [1, 2], 2)
    arguments = hf, tmp_path / "replay", run, False, 1
    workers.run(2, signalled, *arguments, free_port(), 9)

    def steps():
        lines = (run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    assert steps() == [0, 1] and (run / "checkpoints/latest").read_text() == "step_000001"
    assert not (run / "hf_export").exists()
    workers.run(2, replayed, *arguments, free_port(), 9)
    assert steps() == [0, 1, 2] and (run / "hf_export").exists()

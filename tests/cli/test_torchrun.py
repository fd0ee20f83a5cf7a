"""How what torchrun has started ends: one error, the first failure's, and Ctrl-C.

The agent is torch's and the workers are processes; what they do is stood in for: they only end.
tests/e2e/test_endings.py has whole runs.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.starting import ROOT
from tests.launched import Launched
from tests.workers import free_port
from vapo_megatron import errors
from vapo_megatron.cli import torchrun
from vapo_megatron.parallel.health import early_stop

WORKER = """
import os, signal, sys, threading, time
from vapo_megatron.errors import DataError, report
from vapo_megatron.parallel.health import early_stop

rank = int(os.environ["RANK"])
launcher = os.getppid()
early_stop.block_signals()
# They begin together, however long one takes to start.
open(f"{__file__}.{rank}", "w").close()
while not os.path.exists(f"{__file__}.{1 - rank}"):
    time.sleep(0.01)

def mistake():
    report("error: a.jsonl, line 3 is wrong", 2)
    sys.exit(2)

def bug():
    try:
        raise AssertionError("must not be")
    except AssertionError as error:
        import traceback
        report(f"error: AssertionError: {error}", 1, traceback.format_exc())
    os._exit(1)

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def peer():
    time.sleep(1.2)
    report("error: rank 1 (here) in exchange of step 2 is dead", 1)
    os._exit(1)

def silent():
    os._exit(7)

def started_again():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        mistake()

def interrupted():
    '''Rank 0 has its first step behind it.'''
    with early_stop.interrupts_watched(early_stop.end_before_first_step):
        if rank == 0:
            early_stop.note_started()
            os.kill(launcher, signal.SIGINT)
        while not early_stop.pending_signal():
            time.sleep(0.05)
        while sys.argv[3:]:
            os.kill(launcher, signal.SIGINT)
            time.sleep(0.2)
        report("stopped by SIGINT after step 1", 130)

globals()[sys.argv[1 + (rank == 1)]]()
"""


@pytest.fixture
def worker(tmp_path):
    file = tmp_path / "worker.py"
    file.write_text(WORKER)
    return file


def launch(blocks, environment, *arguments):
    """Be torchrun, in a process of a test's own, whose agent may be slow to see that all ended."""
    os.environ.update(environment)
    if "SLOW_TO_SEE" in environment:
        run_agent = torchrun._run_agent

        def slow(*given):
            found = run_agent(*given)
            time.sleep(float(environment["SLOW_TO_SEE"]))
            return found

        torchrun._run_agent = slow
    if blocks:
        early_stop.block_signals()
    return torchrun.main(list(map(str, arguments)))


def end(worker, *does, blocks=False, **environment):
    """Start two workers that do that; the exit code and what was printed."""
    given = {"MASTER_PORT": str(free_port()), **environment}
    command = torchrun.torchrun_command(given, 2, [str(worker), *does])[3:]
    done = Launched(launch, blocks, {"PYTHONPATH": str(ROOT), **environment}, *command).wait()
    assert done.stdout == "", done.stdout
    return done.returncode, done.stderr


def test_a_mistake_on_one_rank_is_the_only_line(worker):
    assert end(worker, "peer", "mistake") == (2, "error: a.jsonl, line 3 is wrong\n")


def test_a_bug_has_its_traceback_once_and_the_error_last(worker):
    code, said = end(worker, "bug", "bug")
    assert code == 1 and said.count("Traceback") == 1
    assert said.endswith("error: AssertionError: must not be\n")
    assert "torch" not in said


def test_of_a_killed_rank_the_signal_and_the_place_are_named(worker):
    code, said = end(worker, "peer", "killed")
    assert code == 1 and said.count("\n") == 1
    assert said.startswith("error: rank 1 (process ")
    assert "was killed by signal 9, SIGKILL (out of memory?); rank 1 (here) in exchange" in said


def test_one_that_ends_without_a_word_is_named(worker):
    code, said = end(worker, "peer", "silent")
    assert code == 1 and said.count("\n") == 1 and "ended with exit code 7; what it" in said


def test_a_start_that_is_not_the_last_tells_at_once(worker):
    said = "error: a.jsonl, line 3 is wrong\n"
    assert end(worker, "started_again", "started_again", MAX_RESTARTS="1") == (0, said)


def test_a_port_in_use_is_a_mistake(worker):
    import socket

    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        code, said = end(worker, "mistake", "mistake", MASTER_PORT=str(port))
    assert code == 2 and said.count("\n") == 1
    assert said.startswith(f"error: MASTER_PORT={port} is in use on this machine; ")


@pytest.mark.parametrize("late", [{}, {"SLOW_TO_SEE": "1.5"}], ids=["at once", "late"])
def test_ctrl_c_reaches_the_workers_and_ends_well(worker, late):
    """The one that has not begun ends at once; that none is left is no other mistake."""
    code, said = end(worker, "interrupted", "interrupted", blocks=True, **late)
    assert code == 130 and said.count("\n") == 1 and said.startswith("stopped by SIGINT ")


def test_a_second_one_ends_all_at_once(worker):
    code, said = end(worker, "interrupted", "interrupted", "twice", blocks=True)
    assert code == 130 and said.startswith("ended at once by a second SIGINT, without saving; ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("module", ["vapo_megatron.cli.launch", "vapo_megatron.cli.main"])
def test_before_anything_has_started_it_is_one_line(module):
    program = (
        f"import os, signal; from {module} import early_stop as e; e.end_on_interrupt('ended')\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: print('caught')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ended\n")


# --- which words are the first failure's ----------------------------------------------------------


def said(logs, rank, code=1, time=0.0, attempt=0):
    """A worker's error file, as errors.report writes it."""
    file = logs / f"none_x/attempt_{attempt}/{rank}/error.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    own = {"line": f"error: of rank {rank}", "code": code, "trace": "", "time": time}
    file.write_text(json.dumps({"own": own}))
    return str(file)


def failed(exitcode, time=0, error_file="none"):
    return SimpleNamespace(exitcode=exitcode, timestamp=time, error_file=error_file, pid=4242)


def test_the_first_in_time_counts(tmp_path):
    files = [said(tmp_path, 0, 1, 100.5), said(tmp_path, 1, 2, 100.1)]
    failures = {r: failed(c, 100, f) for r, c, f in zip((0, 1), (1, 2), files)}
    assert torchrun.last_words(tmp_path, failures)[:2] == ("error: of rank 1", 2)
    # The agent kills who does not end.
    failures[2] = failed(-9, 130)
    assert torchrun.last_words(tmp_path, failures)[:2] == ("error: of rank 1", 2)
    failures[2] = failed(-11, 98)
    line = "error: rank 2 (process 4242) was killed by signal 11, SIGSEGV; of rank 1"
    assert torchrun.last_words(tmp_path, failures)[:2] == (line, 1)


def test_an_earlier_start_does_not(tmp_path):
    said(tmp_path, 0, 2, 100.0, attempt=9)
    file = said(tmp_path, 1, 1, 200.0, attempt=10)
    assert torchrun.last_words(tmp_path, {1: failed(1, 200, file)})[0] == "error: of rank 1"


def test_without_a_failure_only_an_interrupt_counts(tmp_path):
    assert torchrun.last_words(tmp_path, {}) is None
    said(tmp_path, 0, 1, 100.0)
    assert torchrun.last_words(tmp_path, {}) is None
    said(tmp_path, 0, 130, 100.0)
    assert torchrun.last_words(tmp_path, {})[1] == 130


def test_torchs_own_report_has_the_words(tmp_path, monkeypatch, capsys):
    """Started by another torchrun: the error is printed at once, and stands in its report."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    file = tmp_path / "attempt_0/0/error.json"
    file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv(errors.LAUNCHER, "1")
    errors.report("error: a mistake", 2)
    assert capsys.readouterr().err == "error: a mistake\n"
    report = str(ChildFailedError("x", {0: ProcessFailure(0, 4242, 2, str(file))}))
    assert "traceback : error: a mistake" in report
    assert Path(file).is_file()

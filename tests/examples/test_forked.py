"""Runs in forks, with stand-ins for trainer and libraries, in an invocation of their own.

That a fork trains what a process of its own does is for test_ablation.py's slow test.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "tiny"))

from runner.forked import can_fork  # noqa: E402
from runner.schedule import locked  # noqa: E402

from vapo_megatron.errors import DataError  # noqa: E402

HEAVY = """
import os
with open("imported.txt", "a") as file:
    print(os.getpid(), os.environ["THREADS"], file=file)
os.environ["SET_ON_IMPORT"] = "1"
"""

TRAINER = """
import heavy, json, os, pathlib, signal, subprocess, sys, time
out, does = pathlib.Path(sys.argv[1]), sys.argv[2]
out.mkdir(exist_ok=True)
print("argv", json.dumps(sys.argv[1:]), "in", os.getcwd())
known = {
    "session": os.getsid(0) == os.getpid(),
    "variables": [os.environ.get(name) for name in ("THREADS", "SET_ON_IMPORT")],
    "handlers": [signal.getsignal(n) is signal.default_int_handler for n in (2, 15)],
    "main": sys.modules["__main__"].__dict__ is globals(),
}
(out / "known.json").write_text(json.dumps(known))
if does == "fails":
    sys.exit("no disk")
if does == "sleeps":
    subprocess.Popen(["sleep", "987"]).wait()
(out / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\\n")
"""

DRIVER = """
import os, sys
from pathlib import Path
sys.path[:0] = [{root!r}, {root!r} + "/examples/tiny", {here!r}]
from runner import forked
from runner.jobs import Job
from runner.schedule import locked, run_jobs
from vapo_megatron.cli.command import run
forked.LIBRARIES = ("heavy",)
here = Path({here!r})
def job(i, does):
    out = here / "runs" / f"run_{{i}}"
    command = (sys.executable, str(here / "trainer.py"), str(out), does)
    return Job(out.name, out, command, {{}}, num_steps=1)
def work():
    print("buffered")
    with locked(here / "runs") as lock:
        failures = run_jobs(
            [job(i, does) for i, does in enumerate({does!r})], slots=2, lock=lock, cwd=here / "cwd",
            environment={{**os.environ, "THREADS": "1"}},
        )
    for name, why in failures.items():
        print(name, why)
    return 0
sys.exit(run("driver", work, interrupted="run it again"))
"""


@pytest.fixture
def start(tmp_path):
    """Start an invocation with runs that do as they are told: fails, sleeps or trains."""
    (tmp_path / "heavy.py").write_text(HEAVY)
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "cwd").mkdir()
    started = []

    def begin(*does: str) -> subprocess.Popen:
        code = DRIVER.format(root=str(ROOT), here=str(tmp_path), does=does)
        # It would hide what waits in a buffer.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env=environment,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def sleeping(process: subprocess.Popen) -> list[psutil.Process]:
    """Wait until two runs have a sleeping process each; return the four."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        found = psutil.Process(process.pid).children(recursive=True)
        if [child.name() for child in found].count("sleep") == 2:
            return found
        time.sleep(0.05)
    raise AssertionError("the runs' own processes did not come")


def test_libraries_are_imported_once_and_all_else_is_as_for_a_process(start, tmp_path):
    process = start("trains", "trains", "fails")
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert (tmp_path / "imported.txt").read_text() == f"{process.pid} 1\n"
    for i in range(3):
        found = json.loads((tmp_path / f"runs/run_{i}/known.json").read_text())
        assert found == {
            "session": True, "variables": ["1", "1"], "handlers": [True, False], "main": True,
        }  # fmt: skip
    log = (tmp_path / "runs/run_0.log").read_text()
    assert log == f'argv ["{tmp_path}/runs/run_0", "trains"] in {tmp_path}/cwd\n'
    assert (tmp_path / "runs/run_2.log").read_text().endswith("no disk\n")
    assert f"run_2 exit code 1 at step 0/1, see {tmp_path}/runs/run_2.log" in text
    assert text.count("buffered") == 1 and text.count("importing torch") == 1


def test_an_interrupt_leaves_no_fork_and_loses_no_line(start, tmp_path):
    process = start("sleeps", "sleeps")
    children = sleeping(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not psutil.wait_procs(children, timeout=10)[1]
    assert (tmp_path / "runs/run_0.log").read_text().startswith("argv ")


def test_forks_that_outlive_their_invocation_hold_its_lock(start, tmp_path):
    process = start("sleeps", "sleeps")
    children = sleeping(process)
    process.kill()
    process.wait()
    with pytest.raises(DataError, match="processes left by one"), locked(tmp_path / "runs"):
        pass
    for child in children:
        child.kill()
    psutil.wait_procs(children, timeout=10)
    with locked(tmp_path / "runs"):
        pass


def test_what_starts_its_own_processes_is_not_forked():
    assert can_fork((sys.executable, "/x/train.py", "--config", "y"))
    assert can_fork((sys.executable, "-m", "vapo_megatron.train", "--config", "y"))
    # Starts torchrun.
    assert not can_fork((sys.executable, "-m", "vapo_megatron", "train"))
    assert not can_fork((sys.executable, "-c", "pass"))
    assert not can_fork(("bash", "x.py"))

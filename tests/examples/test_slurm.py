"""The Slurm script, with stand-ins for Slurm's commands: what would start where, and how it ends.

Not exercised: Slurm itself. tests/e2e/test_run.py trains through it.
"""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.slurm_stand_in import ROOT, SCRIPT, Cluster
from vapo_megatron.config import load_config

OPTIONS = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", SCRIPT.read_text(), re.MULTILINE))


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


def python(directory, text):
    """An interpreter for the recipe that runs `text` instead of it."""
    body = directory / "instead.py"
    body.write_text(text)
    program = directory / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {body} "$@"\n')
    program.chmod(0o755)
    return {"VAPO_PYTHON": str(program)}


def test_it_is_good_bash_and_asks_for_what_the_recipe_needs():
    assert subprocess.run(["bash", "-n", SCRIPT]).returncode == 0
    configs = [ROOT / f"examples/configs/qwen2.5_{name}.yaml" for name in ("base", "32b")]
    processes = load_config(configs).parallel.world_size
    assert int(OPTIONS["nodes"]) * int(OPTIONS["gpus-per-node"]) == processes
    assert OPTIONS["ntasks-per-node"] == "1" and {"requeue", "exclusive"} <= set(OPTIONS)
    # To the script alone, which passes it on; a log is not lost when the job starts again.
    assert re.fullmatch(r"B:USR1@\d+", OPTIONS["signal"]) and OPTIONS["open-mode"] == "append"
    # Slurm reads options only up to the first command.
    text = SCRIPT.read_text()
    assert text.rindex("#SBATCH") < text.index("\nset -euo pipefail")


def test_each_node_starts_one_launcher(cluster):
    instead = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    job = cluster.submit("seed=3", "logging.run_dir=a b", **python(cluster.directory, instead))
    assert job.communicate(timeout=60)[0] == "" and job.returncode == 0
    assert json.loads(cluster.seen.read_text()) == [
        "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpu-bind=none", "--open-mode=append",
        "--output=runs/slurm/71234/node-%n.log",
    ]  # fmt: skip
    for node in (0, 1):
        arguments, environment = json.loads(cluster.log(node))
        recipe = "examples/run_vapo_qwen32b.sh"
        assert arguments == [recipe, "seed=3", "logging.run_dir=a b"]
        expected = {"NODE_RANK": str(node), "NNODES": "2", "NPROC_PER_NODE": "1"}
        expected |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "21234"}
        assert {name: environment[name] for name in expected} == expected
    assert not cluster.requeued


def test_the_recipe_starts_on_both_nodes(cluster):
    job = cluster.submit("--dry-run", "seed=3")
    assert job.wait(timeout=60) == 0
    for node in (0, 1):
        assert "seed: 3" in cluster.log(node) and "world_size: 128" in cluster.log(node)


def test_a_launcher_that_fails_ends_the_job(cluster):
    instead = "import os, sys, time; os.environ['NODE_RANK'] == '1' and sys.exit(2); time.sleep(60)"
    job = cluster.submit(**python(cluster.directory, instead))
    assert job.wait(timeout=30) != 0
    assert not cluster.requeued, "what failed would fail again"


WORKER = """
import signal, sys, time
print("ready", flush=True)
end = time.monotonic() + 60
while not (HEARS and signal.SIGUSR1 in signal.sigpending()) and time.monotonic() < end:
    time.sleep(0.05)
time.sleep(1.5)
print("saved", flush=True)
sys.exit(CODE)
"""


def signalled(cluster, hears, code=0, **environment):
    """Start a job, signal it when both nodes' workers run, wait for its end, return both logs.

    Its launchers block the signal, as recipes do; their workers have sessions of their own.
    """
    worker = cluster.directory / "worker.py"
    worker.write_text(WORKER.replace("HEARS", str(hears)).replace("CODE", str(code)))
    launcher = (
        "import signal, subprocess, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
        f"command = [sys.executable, {str(worker)!r}]\n"
        "sys.exit(subprocess.Popen(command, start_new_session=True).wait())\n"
    )
    job = cluster.submit(**python(cluster.directory, launcher), **environment)
    deadline = time.monotonic() + 60
    while not all("ready" in cluster.log(node) for node in (0, 1)):
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    assert not cluster.requeued
    job.send_signal(signal.SIGUSR1)
    job.wait(timeout=60)
    return cluster.log(0), cluster.log(1)


def test_the_early_signal_reaches_every_worker_and_the_job_is_queued_again(cluster):
    logs = signalled(cluster, hears=True)
    assert all("saved" in log for log in logs), "srun was waited for"
    assert cluster.requeued


def test_a_run_that_fails_after_the_signal_is_queued_again_too(cluster):
    signalled(cluster, hears=True, code=1)
    assert cluster.requeued, "its last checkpoint is as good as any"


def test_a_run_that_does_not_stop_is_ended_in_time(cluster):
    logs = signalled(cluster, hears=False, VAPO_STOP_SECONDS="1")
    assert not any("saved" in log for log in logs)
    assert cluster.requeued

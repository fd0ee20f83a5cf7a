"""Stand-ins for Slurm's commands, for machines without a cluster.

That for srun starts what it is told once for each node, all on this machine, and carries a signal
to every process that they have become, as slurmstepd does to a step's container.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples/slurm/run_vapo_qwen32b.sbatch"

SRUN = '''
import contextlib, json, os, signal, subprocess, sys, time
from pathlib import Path

import psutil

def carry(number, frame):
    """To the tasks and all that came of them, whatever their sessions and groups."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)

program = sys.argv.index("bash")
options, command = sys.argv[1:program], sys.argv[program:]
Path(os.environ["SEEN"]).write_text(json.dumps(options))
output = dict(o.split("=", 1) for o in options)["--output"]
tasks = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, carry)
for node in range(int(os.environ["SLURM_JOB_NUM_NODES"])):
    with open(output.replace("%n", str(node)), "a") as log:
        environment = {**os.environ, "SLURM_NODEID": str(node)}
        tasks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
# --kill-on-bad-exit=1: one that fails ends the others.
codes = [None]
while None in codes:
    codes = [task.poll() for task in tasks]
    if any(codes):
        carry(signal.SIGKILL, None)
    time.sleep(0.05)
sys.exit(max(abs(code) for code in codes))
'''

SCONTROL = """#!/bin/bash
case "$1 $2" in
  "show hostnames") [ "$3" = "gpu[1-2]" ] && printf '127.0.0.1\\nsecond\\n' ;;
  "requeue $SLURM_JOB_ID") echo "$2" >>"$SEEN.requeued" ;;
  *) exit 1 ;;
esac
"""


class Cluster:
    """Two nodes of one GPU each, in a directory of their own."""

    def __init__(self, directory):
        self.directory = directory
        self.seen = directory / "seen.json"
        programs = directory / "bin"
        programs.mkdir()
        (programs / "srun").write_text(f"#!{sys.executable}\n{SRUN}")
        (programs / "scontrol").write_text(SCONTROL)
        for program in programs.iterdir():
            program.chmod(0o755)
        (directory / "examples").symlink_to(ROOT / "examples")
        kept = {
            k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        }
        self.environment = {
            **kept,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "VAPO_PYTHON": sys.executable,
            "SEEN": str(self.seen),
            "SLURM_SUBMIT_DIR": str(directory),
            # The port becomes 20000 + 1234.
            "SLURM_JOB_ID": "71234",
            "SLURM_JOB_NODELIST": "gpu[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "NPROC_PER_NODE": "1",
        }

    def submit(self, *arguments, **environment):
        """Start the script as slurmd does: a copy of it elsewhere, its arguments after it."""
        copy = self.directory / "slurm_script"
        copy.write_bytes(SCRIPT.read_bytes())
        return subprocess.Popen(
            ["bash", str(copy), *map(str, arguments)],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def log(self, node):
        """What a node has said so far."""
        log = self.directory / f"runs/slurm/71234/node-{node}.log"
        return log.read_text() if log.exists() else ""

    @property
    def requeued(self):
        """Has the job asked to be queued again?"""
        return Path(f"{self.seen}.requeued").exists()

"""Starts commands as a user does, with a stand-in for torchrun."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start(*command, **environment):
    """Run a command in the repository, without what a launcher around the tests may have set."""
    launchers = ("RANK", "WORLD_SIZE", "NODE_RANK", "NNODES", "NPROC_PER_NODE", "OMP_NUM_THREADS")
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in launchers and not k.startswith(("LOCAL_", "MASTER_", "TORCHELASTIC_"))
    }
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**clean, "VAPO_PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )


def make_stand_in(directory):
    """Make a torchrun that prints what it was started with; return its PYTHONPATH."""
    (directory / "stand_in").mkdir()
    (directory / "stand_in/sitecustomize.py").write_text(
        "import json, os, shutil, signal, sys\n"
        "from types import SimpleNamespace\n"
        # A disk of unknown size: none here has room for a large model's checkpoint.
        "shutil.disk_usage = lambda path: SimpleNamespace(total=0, free=0)\n"
        "if 'vapo_megatron.cli.torchrun' in sys.orig_argv:\n"
        "    print(json.dumps({'arguments': sys.orig_argv[3:], 'environment': dict(os.environ),\n"
        "        'blocks': list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))}),\n"
        "        flush=True)\n"
        "    os._exit(0)\n"
    )
    return f"{directory / 'stand_in'}:{ROOT}"

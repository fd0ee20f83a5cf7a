"""The set-up script's checks, under the strictest shell options that its callers use.

Does not make an environment: tests/run.sh has just done that.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "cat", "cut", "dirname", "flock", "grep", "rm", "sha256sum")


def set_up(tmp_path, *, ldconfig, lscpu=True, **environment):
    """Source the script with a PATH of its own; the base Python is /bin/false, so it ends early."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in TOOLS:
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    for name, text in {"ldconfig": ldconfig, "lscpu": "true"}.items():
        if name != "lscpu" or lscpu:
            (programs / name).write_text(f"#!/bin/bash\n{text}\n")
            (programs / name).chmod(0o755)
    unset = ("VIRTUAL_ENV", "CONDA_PREFIX", "VAPO_PYTHON")
    clean = {k: v for k, v in os.environ.items() if k not in unset}
    return subprocess.run(
        ["bash", "-c", "set -euo pipefail; source tools/setup_env.sh; echo reached"],
        cwd=ROOT,
        env={
            **clean,
            "PATH": str(programs),
            "VAPO_VENV": str(tmp_path / "venv"),
            "VAPO_BASE_PYTHON": "/bin/false",
            **environment,
        },
        capture_output=True,
        text=True,
    )


def test_a_long_list_of_libraries_is_read_to_its_end(tmp_path):
    """A reader that stopped at the first match would end ldconfig by a signal: a failure."""
    listing = "echo libnuma.so.1; for i in {1..20000}; do echo library.$i; done"
    done = set_up(tmp_path, ldconfig=listing)
    assert "making" in done.stderr, done.stderr


def test_missing_libnuma_is_named(tmp_path):
    done = set_up(tmp_path, ldconfig="echo libc.so.6")
    assert done.returncode == 1 and "reached" not in done.stdout
    assert "libnuma.so.1" in done.stderr and "apt-get install libnuma1" in done.stderr


def test_missing_lscpu_is_named(tmp_path):
    done = set_up(tmp_path, ldconfig="echo libnuma.so.1", lscpu=False)
    assert done.returncode == 1
    assert "lscpu" in done.stderr and "apt-get install util-linux" in done.stderr


@pytest.mark.parametrize("variable", ["VAPO_PYTHON", "VIRTUAL_ENV"])
def test_a_given_environment_is_used_and_checked(tmp_path, variable):
    done = set_up(tmp_path, ldconfig="true", **{variable: "/bin/false"})
    assert done.returncode == 1
    assert "making" not in done.stderr and "has no module 'torch'" in done.stderr

"""The set-up script's checks and choices, under the strictest shell options that its callers use.

Does not make an environment: tests/run.sh has just done that.
"""

import hashlib
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
    unset = ("VIRTUAL_ENV", "CONDA_PREFIX", "VAPO_PYTHON", "VAPO_ENVIRONMENT")
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


def test_a_named_environment_is_made_whatever_the_shell_is_in(tmp_path):
    within = {"VAPO_PYTHON": "/bin/false", "VIRTUAL_ENV": "/nonexistent"}
    done = set_up(tmp_path, ldconfig="echo libnuma.so.1", VAPO_ENVIRONMENT="newest", **within)
    assert "making" in done.stderr and "(about five minutes, 6 GB)" in done.stderr, done.stderr
    # The base Python of these tests makes nothing.
    assert done.returncode == 1 and "reached" not in done.stdout


def test_an_environment_by_an_unknown_name_is_refused(tmp_path):
    done = set_up(tmp_path, ldconfig="true", VAPO_ENVIRONMENT="oldest")
    assert done.returncode == 1
    assert "VAPO_ENVIRONMENT=oldest must be newest, or unset" in done.stderr


def test_a_python_of_the_pinned_version_is_asked_for_by_name(tmp_path):
    """Neither of the machine's: there is none on this PATH."""
    for name, version in (("", "3.11"), ("newest", "3.12")):
        (tmp_path / version).mkdir()
        none = {"VAPO_BASE_PYTHON": "", "PYENV_ROOT": str(tmp_path), "VAPO_ENVIRONMENT": name}
        done = set_up(tmp_path / version, ldconfig="echo libnuma.so.1", **none)
        assert done.returncode == 1
        assert f"no Python {version} with venv and pip was found" in done.stderr
        assert f"VAPO_BASE_PYTHON=/path/to/python{version}" in done.stderr


STAND_IN = """#!/bin/bash
echo "$(basename "$(dirname "$(dirname "$0")")"), GPUs '${CUDA_VISIBLE_DEVICES-all}': $*"
"""


WHOLE_SUITE = "-n 4 --dist loadfile --no-loadscope-reorder"


@pytest.mark.parametrize(
    ("given", "requirements", "gpus", "asked"),
    [
        ("", "cpu.txt", "all", WHOLE_SUITE),
        ("tests/algorithm -k gae", "cpu.txt", "all", "tests/algorithm -k gae"),
        ("--environment newest", "cpu-newest.txt", "", WHOLE_SUITE),
        ("--environment newest tests -x", "cpu-newest.txt", "", "tests -x"),
    ],
)
def test_the_tests_run_in_the_environment_that_is_asked_for(
    tmp_path, given, requirements, gpus, asked
):
    """It is told by its stamp, of its own requirements; its interpreter prints what it is given."""
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/python").write_text(STAND_IN)
    (tmp_path / "env/bin/python").chmod(0o755)
    made_from = (ROOT / "requirements" / requirements, ROOT / "tools/setup_env.sh")
    stamp = hashlib.sha256(b"".join(path.read_bytes() for path in made_from)).hexdigest()
    (tmp_path / "env/.vapo_installed").write_text(f"{stamp}\n")
    gone = ("VIRTUAL_ENV", "CONDA_PREFIX", "VAPO_PYTHON", "VAPO_ENVIRONMENT")
    environment = {k: v for k, v in os.environ.items() if k not in gone}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    environment |= {"VAPO_VENV": str(tmp_path / "env"), "VAPO_BASE_PYTHON": "/bin/false"}
    (tmp_path / "nvidia-smi").symlink_to("/bin/true")  # A GPU's python would be used as it is.
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "tests/run.sh", *given.split()],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert "reusing" in done.stderr, done.stderr
    start = f"env, GPUs '{gpus}': -m"
    sources = "vapo_megatron tools examples tests docs setup.py"
    linted = [f"{start} ruff check {sources}", f"{start} ruff format --check --quiet {sources}"]
    # Beside the tests, so in either order.
    typed = [] if given.endswith(asked) else [f"{start} mypy vapo_megatron"]
    installed, *rest = done.stdout.splitlines()
    # Only the command `vapo` is installed anew, because the one that is there is of no checkout.
    assert installed.startswith(f"{start} pip install ")
    assert installed.endswith(f"--no-index --editable {ROOT}")
    assert rest[:2] == linted
    assert sorted(rest[2:]) == [*typed, f"{start} pytest -q {asked}"]


def test_an_environment_without_a_name_is_refused():
    done = subprocess.run(
        ["bash", "tests/run.sh", "--environment"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0 and "--environment needs a name: newest" in done.stderr

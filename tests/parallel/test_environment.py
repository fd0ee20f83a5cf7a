"""Defaults of environment variables, and whose value is kept.

Not exercised: CUDA and NCCL, which read them.
"""

import os
import subprocess
import sys

import pytest

from vapo_megatron.parallel import environment


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """No variable of DEFAULTS is set; files that NCCL reads are in the returned directory."""
    for name in environment.DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    return tmp_path


def test_every_process_has_the_defaults_before_torch_is_loaded(unset):
    code = "import os, sys, {}; print(os.environ['NCCL_NVLS_ENABLE'], 'torch' in sys.modules)"
    # The launcher, and what a worker imports first.
    for module in ("vapo_megatron.cli.launch", "vapo_megatron.cli.train"):
        done = subprocess.run([sys.executable, "-c", code.format(module)], capture_output=True)
        assert done.stdout.split() == [b"0", b"False"], done.stderr


def test_a_users_value_stays(unset, monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    environment.set_defaults()
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


@pytest.mark.parametrize("file", [".nccl.conf", "cluster.conf"])
def test_a_clusters_file_of_nccl_stays_in_force(unset, monkeypatch, file):
    (unset / file).write_text("#NCCL_NVLS_ENABLE=0\nNCCL_DEBUG=WARN\nNCCL_NVLS_ENABLE=2\n")
    if file == "cluster.conf":
        monkeypatch.setenv("NCCL_CONF_FILE", str(unset / file))
    environment.set_defaults()
    assert "NCCL_NVLS_ENABLE" not in os.environ, "the environment overrides the file"
    assert environment.value("NCCL_NVLS_ENABLE") == "2"
    # Only NCCL's own variables are there.
    assert environment.value("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def test_a_file_that_says_nothing_of_it_changes_nothing(unset):
    (unset / ".nccl.conf").write_text("NCCL_DEBUG=WARN\n#NCCL_NVLS_ENABLE=1\n")
    environment.set_defaults()
    assert environment.value("NCCL_NVLS_ENABLE") == "0"

"""Defaults of environment variables, and whose value is kept.

Not exercised: CUDA and NCCL, which read them.
"""

import os
import stat
import tempfile

import pytest

from tests.alone import printed_by
from vapo_megatron.parallel import environment


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """No variable of DEFAULTS is set; files that NCCL reads are in the returned directory."""
    for name in (*environment.DEFAULTS, *environment.WITHOUT_MULTICAST, *environment.CACHES):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "node").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "node"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    return tmp_path


def test_every_process_has_the_defaults_before_torch_is_loaded(unset):
    code = "import os, sys, {}; print(os.environ['NCCL_NVLS_ENABLE'], 'torch' in sys.modules)"
    # The launcher, and what a worker imports first.
    for module in ("vapo_megatron.cli.launch", "vapo_megatron.cli.train"):
        assert printed_by(code.format(module)).split() == ["0", "False"]


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


MULTICAST = ("VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_ALLREDUCE_USE_SYMM_MEM")


def test_vllm_binds_no_multicast_memory_where_nccl_does_not(unset):
    environment.set_defaults()
    assert [os.environ[name] for name in MULTICAST] == ["0", "0"]
    assert not environment.has_multicast()


@pytest.mark.parametrize("value", ["1", "2"])
def test_one_switch_turns_multicast_on_for_both(unset, monkeypatch, value):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", value)
    environment.set_defaults()
    assert not any(name in os.environ for name in MULTICAST)
    assert environment.has_multicast()


def test_one_of_vllms_own_variables_stays(unset, monkeypatch):
    monkeypatch.setenv(MULTICAST[0], "1")
    environment.set_defaults()
    assert [os.environ[name] for name in MULTICAST] == ["1", "0"]


def test_kernels_are_compiled_on_the_node_before_torch_and_vllm_are_loaded(unset):
    code = (
        "import os, sys, vapo_megatron.cli.launch; from vapo_megatron.parallel import environment;"
        "print(*[os.environ[name] for name in environment.CACHES], "
        "'torch' in sys.modules, 'vllm' in sys.modules)"
    )
    printed = printed_by(code).split()
    base = unset / "node" / f"vapo_megatron-{os.getuid()}"
    folders = [str(base / name) for name in ("triton", "inductor", "flashinfer", "vllm")]
    assert printed == [*folders, "False", "False"]
    assert stat.S_IMODE(base.stat().st_mode) == 0o700


def test_a_users_cache_stays(unset, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    environment.set_defaults()
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"
    assert os.environ["VLLM_CACHE_ROOT"].startswith(str(unset / "node"))


@pytest.mark.parametrize("wrong", ["open to others", "a link", "a file"])
def test_a_folder_that_others_can_write_to_is_not_used(unset, wrong):
    """Compiled code is loaded from it, and anybody can make it first in a shared /tmp."""
    base = unset / "node" / f"vapo_megatron-{os.getuid()}"
    if wrong == "open to others":
        base.mkdir()
        base.chmod(0o777)
    elif wrong == "a link":
        (unset / "elsewhere").mkdir(mode=0o700)
        base.symlink_to(unset / "elsewhere")
    else:
        base.write_text("")
    environment.set_defaults()
    assert not any(name in os.environ for name in environment.CACHES)


def test_a_folder_of_another_user_is_not_used(unset, monkeypatch):
    base = unset / "node" / "vapo_megatron-12345"
    base.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert environment.cache_directory() is None

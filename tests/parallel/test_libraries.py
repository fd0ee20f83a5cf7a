"""Versions found, known bad pairs, and installations that cannot be imported, by stand-ins.

Not exercised: a CUDA build of torch, and the libraries themselves.
"""

import subprocess
import sys

import pytest
import torch

from tests.alone import loaded_by
from tools import gpu_smoke
from vapo_megatron.cli import preflight
from vapo_megatron.config import load_config
from vapo_megatron.errors import ConfigError
from vapo_megatron.parallel import libraries, megatron_on_cpu

FINE = {
    "torch": "2.13.0+cu130", "CUDA": "13.0", "NCCL": "2.29.7", "cuDNN": "9.20.0",
    "Transformer Engine": "2.11.0", "vLLM": "0.32.0", "megatron-core": "0.16.1",
    "NCCL_NVLS_ENABLE": "0",
}  # fmt: skip
"""What requirements/gpu.txt installs."""


def test_the_pinned_versions_are_not_known_to_be_bad():
    assert libraries.known_bad(FINE) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"NCCL_NVLS_ENABLE": "1"}, "NCCL 2.29.7 with NCCL_NVLS_ENABLE 1: a communicator fails"),
        ({"system cuDNN": "9.13.0"}, "system cuDNN 9.13.0 with cuDNN 9.20.0: Transformer Engine"),
        ({"cuDNN": "9.15.1"}, "cuDNN 9.15.1 with Transformer Engine 2.11.0: with parallel.recomp"),
        ({"Transformer Engine": "2.12.0"}, "megatron-core 0.16.1 with Transformer Engine 2.12.0:"),
        ({"Transformer Engine": "2.8.0"}, "megatron-core 0.16.1 with Transformer Engine 2.8.0:"),
        ({"torch": "2.11.0+cu130"}, "vLLM 0.32.0 with torch 2.11.0+cu130: vLLM's kernels are"),
    ],
)
def test_a_known_bad_pair_is_one_line_with_its_source(changes, words):
    (line,) = libraries.known_bad({**FINE, **changes})
    assert line.startswith(words) and "\n" not in line
    assert line.endswith(")") and ("https://" in line or "metadata" in line)


def test_each_pair_of_the_table_is_seen_by_the_test_above():
    assert len(libraries.KNOWN_BAD) == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"megatron-core": "0.19.2", "Transformer Engine": "2.14.0"},
        {"NCCL": "2.28.9", "NCCL_NVLS_ENABLE": "1"},
        {"NCCL_NVLS_ENABLE": "yes"},  # No number: NCCL ignores it.
        {"cuDNN": "9.15.1", "Transformer Engine": None},
        {"cuDNN": "unusable (cuDNN version incompatibility)"},
        {"vLLM": "0.26.0", "torch": "2.11.0"},
        {"system cuDNN": "9.20.0"},
    ],
)
def test_other_pairs_are_not(changes):
    assert libraries.known_bad({**FINE, **changes}) == []


def test_versions_of_this_machine(monkeypatch, capsys):
    found = libraries.versions()
    assert found["torch"] == torch.__version__ and found["megatron-core"].startswith("0.")
    assert list(found)[:7] == list(FINE)[:7]
    found["NCCL"], found["NCCL_NVLS_ENABLE"] = "2.29.7", "1"
    monkeypatch.setattr(libraries, "versions", lambda: found)
    libraries.report()
    printed, told = capsys.readouterr()
    assert printed.startswith(f"vapo_megatron 0.1.0, found torch {torch.__version__}, CUDA ")
    assert ", megatron-core 0." in printed and printed.count("\n") == 1
    assert told.startswith("warning: NCCL 2.29.7 with NCCL_NVLS_ENABLE 1: ")


def test_versions_load_no_library_but_torch():
    code = "from vapo_megatron.parallel import libraries; libraries.versions()"
    assert loaded_by(code, ("megatron", "vllm", "transformer_engine")) == []


def test_a_cudnn_of_cuda_has_three_numbers(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    assert libraries._cudnn() == "9.20.0"

    def conflict():
        raise RuntimeError("cuDNN version incompatibility: found (9, 1, 0)")

    monkeypatch.setattr(torch.backends.cudnn, "version", conflict)
    assert libraries._cudnn() == "unusable (cuDNN version incompatibility: found (9, 1, 0))"


def test_a_systems_cudnn_is_found_and_pythons_is_not_taken_for_one(monkeypatch, tmp_path):
    pips = tmp_path / "site-packages/nvidia/cudnn/lib"
    for place, name in ((tmp_path / "lib64", "libcudnn.so.9.13.0"), (pips, "libcudnn.so.9")):
        place.mkdir(parents=True)
        (place / name).touch()
    (tmp_path / "lib64/libcudnn.so").symlink_to("libcudnn.so.9.13.0")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{pips}")
    before = libraries._system_cudnn()
    assert before is None or before != "9", "a machine may have one; pip's is none"
    monkeypatch.setenv("CUDNN_HOME", str(tmp_path))
    assert libraries._system_cudnn() == "9.13.0"


DAMAGED = {
    "RuntimeError": "raise RuntimeError('cudnn shared object not found.')",
    "OSError": "import ctypes; ctypes.CDLL('libtransformer_engine_of_another_cuda.so')",
    "FileNotFoundError": "open('/nonexistent/transformer_engine_torch.so')",
    "AssertionError": "assert False, 'Transformer Engine package version mismatch'",
    "ModuleNotFoundError": "import onnxscript_that_it_requires",
    "ImportError": "raise ImportError('libtransformer_engine.so: undefined symbol: _ZN3c105Error')",
}
BESIDE = {error: ("transformer_engine", code) for error, code in DAMAGED.items()}
BESIDE["apex"] = ("apex", "raise RuntimeError('compiled for another CUDA')")
BESIDE["neither"] = ("unrelated", "")
"""Case -> a library and what its import does."""
IMPORTS = """
import os, sys
import torch
from vapo_megatron.config import ModelConfig
from vapo_megatron.errors import ConfigError
for place in sys.argv[1].split(":"):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    sys.path.insert(0, place)
    print(os.path.basename(place), end=" ")
    try:
        from vapo_megatron.parallel import megatron_on_cpu
        if "--gpu" in sys.argv:
            megatron_on_cpu.has_gpu = lambda: True
        if "--look" in sys.argv:
            from vapo_megatron.parallel import libraries
            libraries.check_imports()
            print("looked")
            raise SystemExit
        from vapo_megatron.models.layer_spec import uses_transformer_engine
        print("imported", uses_transformer_engine(ModelConfig(layer_spec="local")))
    except ConfigError as error:
        print("ConfigError", error)
    except SystemExit:
        pass
    sys.stdout.flush()
    os._exit(0)
"""
"""What training imports, in a process for each directory of libraries."""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Case -> what importing says beside that library, from cases and options."""
    places = tmp_path_factory.mktemp("libraries")
    for case, (library, code) in BESIDE.items():
        (places / case / library).mkdir(parents=True)
        (places / case / library / "__init__.py").write_text(code)
        (places / case / library / "pytorch.py").touch()
    return lambda cases, *options: _imported([places / case for case in cases], *options)


def _imported(places, *options):
    command = [sys.executable, "-c", IMPORTS, ":".join(map(str, places)), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    assert [case for case, *_ in lines] == [place.name for place in places], "a line each"
    return {case: line for case, _, line in lines}


@pytest.fixture(scope="module")
def told(imported):
    """With a GPU, which looks for the libraries; megatron-core itself is not reached."""
    return imported([case for case in BESIDE if case != "neither"], "--gpu")


def test_a_damaged_transformer_engine_is_a_config_error_whatever_the_layers_are(told, subtests):
    for error in DAMAGED:
        with subtests.test(error):
            line = told[error]
            start = "ConfigError transformer_engine.pytorch is installed but cannot be "
            assert line.startswith(start)
            assert f"({error}: " in line and "model.layer_spec" in line
            assert line.endswith("or pip uninstall transformer-engine transformer-engine-torch")


def test_a_damaged_apex_is_one_too(told):
    start = "ConfigError apex is installed but cannot be imported (RuntimeError: "
    assert told["apex"].startswith(start) and told["apex"].endswith("or pip uninstall apex")


def test_one_that_is_not_installed_is_no_error(imported):
    assert imported(["neither"], "--look") == {"neither": "looked"}
    (line,) = imported(["apex"], "--look").values()
    assert line.startswith("ConfigError apex is installed"), "it does look"


def test_without_a_gpu_they_are_not_looked_at_and_none_is_no_error(imported):
    """A process on the CPU of a GPU machine: megatron-core would take the fused Adam."""
    found = imported(["RuntimeError", "apex", "neither"])
    assert found == dict.fromkeys(found, "imported False")


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12080)."


@pytest.fixture
def old_driver(monkeypatch, tmp_path):
    """A CUDA 13 build of torch beside a driver for CUDA 12, and nvidia-smi."""

    def fails():
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fails)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 570.86.15'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(libraries, "_DEVICES", tmp_path)
    return program


def test_a_gpu_that_torch_cannot_use_is_refused(old_driver):
    with pytest.raises(ConfigError) as error:
        libraries.check_driver()
    said = str(error.value)
    assert "has a GPU (NVIDIA H100 80GB HBM3, 570.86.15), but torch" in said and TOO_OLD in said
    assert "CUDA 13.0 needs driver 580 or newer: update the driver" in said


def test_it_is_refused_by_a_launch_by_megatron_and_by_the_smoke_test(
    old_driver, monkeypatch, capsys
):
    monkeypatch.setattr(gpu_smoke, "_is_installed", lambda module: True)
    with pytest.raises(ConfigError, match="has a GPU"):
        preflight.check_rank(preflight_config(), None)
    with pytest.raises(ConfigError, match="has a GPU"):
        megatron_on_cpu._Finder().find_spec("megatron.core", None)
    assert gpu_smoke.main([]) == 2
    assert "needs driver 580" in capsys.readouterr().err


def preflight_config():
    return load_config([], ["model.hf_path=missing"])


def test_device_files_show_a_gpu_where_there_is_no_nvidia_smi(old_driver, tmp_path):
    old_driver.unlink()
    libraries.check_driver()
    (tmp_path / "nvidia0").write_text("")
    with pytest.raises(ConfigError, match="has a GPU .*nvidia0"):
        libraries.check_driver()


@pytest.mark.parametrize("why", ["hidden", "a CPU build", "it works"])
def test_it_is_fine(old_driver, monkeypatch, why):
    if why == "hidden":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    elif why == "a CPU build":
        monkeypatch.setattr(torch.version, "cuda", None)
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    libraries.check_driver()


def test_an_nvidia_smi_that_fails_shows_none(old_driver):
    """Such as where the image has the program, and the machine no GPU."""
    old_driver.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    libraries.check_driver()

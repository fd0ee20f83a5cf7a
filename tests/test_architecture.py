"""The house rules that imports can break: arrows point down, and a few names have one room each.

Reads source text; does not exercise any behaviour.
"""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

from tests.alone import loaded_by

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vapo_megatron"

ROOMS = (
    "__main__", "train", "cli", "training", "planning", "run", "roles", "rollout",
    "weights", "models", "environments", "reward", "parallel", "sandbox", "data", "config",
    "algorithm", "errors",
)  # fmt: skip
"""From the top floor to the ground: a room imports from itself and from those after it."""

ONE_READER = {
    "vllm": "vapo_megatron.rollout.vllm",
    "megatron.core.parallel_state": "vapo_megatron.parallel.groups",
}
"""Who alone imports a name: a module, or a folder and all in it."""

PURE = {
    "algorithm": ("megatron", "vllm"),
    "weights": ("megatron",),
    "planning": ("torch", "megatron", "vllm"),
}
"""What a room imports nowhere, not even inside a function."""

LIGHT = (
    "config", "cli.main", "cli.train", "planning.plan", "models.hf_config", "data.packing",
    "data.problems", "data.trajectories", "rollout.requests", "rollout.tokenizer",
    "rollout.evaluation.statistics",
)  # fmt: skip
"""Modules that start without the large libraries, so that mistakes are told at once."""


def room(module: str) -> str:
    return module.split(".")[1]


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package, the package itself apart."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    del found["vapo_megatron"]
    return found


@functools.cache
def imports(module: str) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names.append(str(node.module))
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def upward(module: str, imported: str) -> bool:
    if not imported.startswith("vapo_megatron."):
        return False
    return ROOMS.index(room(module)) > ROOMS.index(room(imported))


def is_in(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def test_the_rooms_are_those_of_the_list():
    assert {room(m) for m in modules()} == set(ROOMS)
    shims = {"__init__.py", "__main__.py", "train.py", "__pycache__"}
    # py.typed is a marker for type checkers, and no room.
    entries = {p.name for p in PACKAGE.iterdir()} - shims - {"py.typed"}
    assert len(entries) <= 16, sorted(entries)


def test_arrows_point_down():
    wrong = [f"{m} imports {name}" for m in modules() for name in imports(m) if upward(m, name)]
    assert not wrong, wrong


def circle(arrows):
    """Names that import each other in a circle; none: there is no circle."""
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other_in_a_circle():
    """Imports for type checkers and inside functions count too."""
    known = [m for m, path in modules().items() if path.name != "__init__.py"]
    assert circle({m: [n for n in imports(m) if n in known and n != m] for m in known}) == []
    assert set(circle({"a": ["b"], "b": ["c"], "c": ["a"]})) == {"a", "b", "c"}


def test_an_upward_arrow_would_be_seen():
    assert upward("vapo_megatron.algorithm.gae", "vapo_megatron.training.step")
    assert not upward("vapo_megatron.training.step", "vapo_megatron.algorithm.gae")


def test_each_folder_says_its_one_sentence():
    for path in PACKAGE.rglob("*/__init__.py"):
        sentence = ast.get_docstring(ast.parse(path.read_text()))
        assert sentence and len(sentence.splitlines()) == 1 and sentence.endswith("."), path


def test_tests_mirror_the_rooms():
    """A folder of tests is a folder of what it tests, or one that several rooms share."""
    shared = {"distributed", "e2e", "gpu"}
    for path in (ROOT / "tests").rglob("*/__init__.py"):
        folder = path.parent.relative_to(ROOT / "tests")
        places = (PACKAGE / folder, ROOT / folder)
        assert folder.parts[0] in shared or any(p.is_dir() for p in places), folder


@pytest.mark.parametrize("imported", ONE_READER)
def test_one_reader(imported):
    readers = [m for m in modules() if any(is_in(name, imported) for name in imports(m))]
    assert readers
    assert [m for m in readers if not is_in(m, ONE_READER[imported])] == []


def test_the_whole_configuration_stays_at_the_top():
    """Below roles, a room takes its section, or the values that it needs."""
    below = ROOMS[ROOMS.index("roles") + 1 :]
    config = "vapo_megatron.config.VapoConfig"
    wrong = [m for m in modules() if config in imports(m) and room(m) in below]
    assert [m for m in wrong if room(m) != "config"] == []


def test_rooms_stay_pure():
    for module in modules():
        wrong = [n for n in imports(module) if n.split(".")[0] in PURE.get(room(module), ())]
        assert not wrong, f"{module} imports {wrong}"


@pytest.mark.parametrize("module", LIGHT)
def test_what_loads_without_torch(module):
    heavy = ("torch", "megatron", "vllm", "transformers")
    assert loaded_by(f"import vapo_megatron.{module}", heavy) == []


def test_files_and_functions_stay_short():
    for module, path in modules().items():
        text = path.read_text()
        assert len(text.splitlines()) <= 400, f"{module} has {len(text.splitlines())} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                lines = node.end_lineno - node.lineno + 1
                assert lines <= 70, f"{module}.{node.name} has {lines} lines"


def test_source_is_ascii():
    for module, path in modules().items():
        assert path.read_text().isascii(), module

"""The house rules that imports can break: arrows point down, and a few names have one room each.

Reads source text; does not exercise any behaviour.
"""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "vapo_megatron"

# A module may import modules of a lower level, or of its own level where SAME_LEVEL allows it.
LEVELS = {
    "errors": 0,
    "early_signal": 0,
    "process_tree": 0,
    "stalled": 0,
    "progress_bar": 0,
    "config_section": 0,
    "config_algorithm": 0,
    "config_schema": 0,
    "config_help": 1,
    "config_rules": 1,
    "techniques": 1,
    "config": 1,
    "command": 1,
    "batch": 1,
    "algorithm": 1,
    "parallel": 2,
    "models": 2,
    "data": 2,
    "reward": 2,
    "flops": 3,
    "watchdog": 3,
    "weights": 3,
    "rollout": 3,
    "planning": 4,
    "run_directory": 2,
    "file_lock": 2,
    "metrics": 3,
    "phase_timer": 4,
    "progress_view": 4,
    "progress": 5,
    "report_arms": 4,
    "report_charts": 4,
    "report_page": 4,
    "report_plots": 5,
    "report_problems": 4,
    "report_rollouts": 5,
    "report_sections": 5,
    "report_comparison": 5,
    "report": 5,
    "advantages": 4,
    "policy_mask": 4,
    "shown_tokens": 5,
    "trained_model": 4,
    "gradients": 4,
    "rollout_dump": 3,
    "rollout_source": 4,
    "replay": 5,
    "turns": 5,
    "sampling_rounds": 5,
    "sampling": 5,
    "skipped_updates": 5,
    "step_metrics": 5,
    "evaluation": 5,
    "actor": 5,
    "critic": 5,
    "reference": 5,
    "hashed_file": 0,
    "checkpoint_files": 3,
    "checkpoint_writer": 5,
    "checkpoint": 5,
    "checkpoint_fits": 5,
    "run_output": 6,
    "trainer": 7,
    "inputs": 6,
    "gradient_check": 8,
    "train": 8,
    "launch": 9,
}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "package"


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE.parent).with_suffix("")
        parts = [p for p in relative.parts if p != "__init__"]
        yield ".".join(parts), path


@functools.cache
def imports(path: Path):
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(str(node.module))
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def upward(module: str, imported: str) -> bool:
    if not imported.startswith("vapo_megatron."):
        return False
    here, there = room(module), room(imported)
    return here != there and LEVELS[there] > LEVELS[here]


def test_every_module_has_a_level():
    names = {room(m) for m, _ in modules() if m != "vapo_megatron"}
    assert names <= set(LEVELS), f"give these a level: {names - set(LEVELS)}"
    assert set(LEVELS) <= names, f"these are gone: {set(LEVELS) - names}"


@pytest.mark.parametrize("module,path", [m for m in modules() if m[0] != "vapo_megatron"])
def test_arrows_point_down(module, path):
    wrong = [name for name in imports(path) if upward(module, name)]
    assert not wrong, f"{module} (level {LEVELS[room(module)]}) imports upwards: {wrong}"


def test_an_upward_arrow_would_be_seen():
    assert upward("vapo_megatron.algorithm.gae", "vapo_megatron.trainer")
    assert not upward("vapo_megatron.trainer", "vapo_megatron.algorithm.gae")


@pytest.mark.parametrize(
    "imported,only",
    [
        ("vllm", "vapo_megatron.rollout.engine"),
        ("megatron.core.parallel_state", "vapo_megatron.parallel.groups"),
    ],
)
def test_one_reader(imported, only):
    readers = {
        m
        for m, path in modules()
        if any(n == imported or n.startswith(imported + ".") for n in imports(path))
    }
    assert readers == {only}


@pytest.mark.parametrize(
    "name,forbidden",
    [("algorithm", ("megatron", "vllm", "vapo_megatron.parallel")), ("weights", ("megatron",))],
)
def test_a_room_stays_pure(name, forbidden):
    for module, path in modules():
        if module != "vapo_megatron" and room(module) == name:
            found = [i for i in imports(path) if i.split(".")[0] in forbidden or i in forbidden]
            assert not found, f"{module} imports {found}"


@pytest.mark.parametrize("module", ["vapo_megatron.config", "vapo_megatron.train"])
def test_configuration_loads_without_torch(module):
    heavy = ("torch", "megatron", "vllm")
    code = f"import {module}, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_and_functions_stay_short():
    for module, path in modules():
        text = path.read_text()
        assert len(text.splitlines()) <= 400, f"{module} has {len(text.splitlines())} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                lines = node.end_lineno - node.lineno + 1
                assert lines <= 80, f"{module}.{node.name} has {lines} lines"


def test_source_is_ascii():
    for module, path in modules():
        assert path.read_text().isascii(), module


@pytest.mark.slow
def test_types_fit():
    """A minute without mypy's cache."""
    command = [sys.executable, "-m", "mypy", "vapo_megatron"]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]

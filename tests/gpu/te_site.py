"""The Python of the pinned Transformer Engine, made importable on a CPU in a directory of its own.

The package `transformer-engine` holds all of its Python (0.7 MB; the compiled parts are other
packages). `make_site` unpacks it and lays stand-ins beside it: te_extension.py for the compiled
extension, te_cuda.py for torch.cuda, and empty ones for onnx and onnxscript, which only its export
uses. The source is changed as vapo_megatron.parallel.megatron_on_cpu changes megatron-core's, and

    x.is_cuda               x.is_cpu
    torch.float16           torch.float32, in attention: the fused one takes no float32
    transformer_engine.common loads neither cuDNN, nvrtc and curand nor compiled libraries

Only a process that has the directory on sys.path sees any of it.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

from vapo_megatron.parallel import megatron_on_cpu

HERE = Path(__file__).parent
CUDA, EXTENSION = "transformer_engine_cuda", "transformer_engine_torch"
NOTHING = """
from unittest.mock import MagicMock


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
"""


def pinned_version() -> str:
    """Return the version of Transformer Engine in requirements/gpu.txt."""
    lines = (HERE.parents[1] / "requirements/gpu.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line.startswith("transformer-engine")]
    (exact,) = pins[0].specifier
    return exact.version


def find_wheel(directory: Path, version: str) -> Path:
    """Return the wheel in a directory that outlives the tests; downloaded if it is not there."""
    name = f"transformer_engine-{version}-py3-none-any.whl"
    if not (directory / name).exists():
        command = [
            sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check",
            "--no-deps", "--only-binary", ":all:", "--dest", str(directory),
            f"transformer-engine=={version}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and (directory / name).exists(), (
            f"these tests need the Python of transformer-engine=={version}: 0.7 MB from a package "
            f"index that pip can reach, or the file {name} in {directory}; pip said: "
            f"{(done.stdout + done.stderr).strip()[-600:]}"
        )
    return directory / name


def make_site(wheel: Path, directory: Path) -> None:
    """Fill an empty directory, for the front of sys.path."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    for path in (directory / "transformer_engine").rglob("*.py"):
        path.write_text(translated(path.read_text(), path.relative_to(directory)))
    shutil.copy(HERE / "te_cuda.py", directory / f"{CUDA}.py")
    shutil.copy(HERE / "te_extension.py", directory / f"{EXTENSION}.py")
    for name in ("onnx", "onnxscript"):
        (directory / f"{name}.py").write_text(NOTHING)


def translated(source: str, path: Path) -> str:
    """Return a module's source for the CPU."""
    tree = _Translator(in_attention="attention" in path.parts).visit(ast.parse(source))
    if path.as_posix() == "transformer_engine/common/__init__.py":
        _load_no_libraries(tree)
    start = 0
    for index, node in enumerate(tree.body):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            start = index + 1
        else:
            break
    stand_in = ast.alias(CUDA, megatron_on_cpu._STAND_IN)
    tree.body.insert(start, ast.Import([stand_in]))
    return ast.unparse(ast.fix_missing_locations(tree))


def _load_no_libraries(tree: ast.Module) -> None:
    """Drop what loads the shared libraries, and take the stand-in for the extension."""
    loading = [n for n in tree.body if isinstance(n, ast.If) and "_load_cuda" in ast.unparse(n)]
    extension = [n for n in tree.body if getattr(n, "name", "") == "load_framework_extension"]
    assert len(loading) == len(extension) == 1, "transformer_engine.common has another form"
    tree.body.remove(loading[0])
    importing = "importlib.import_module('transformer_engine_' + framework)"
    extension[0].body = ast.parse(importing).body


class _Translator(megatron_on_cpu._Translator):
    """The table in the module's docstring."""

    def __init__(self, *, in_attention: bool) -> None:
        self.in_attention = in_attention

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        found = super().visit_Attribute(node)
        if isinstance(found, ast.Attribute):
            if found.attr == "is_cuda":
                found.attr = "is_cpu"
            elif self.in_attention and ast.unparse(found) == "torch.float16":
                found.attr = "float32"
        return found

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if ast.unparse(node.func) == "torch.device":
            del node.args[1:]  # the index
        return super().visit_Call(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module == "torch.cuda":
            node.module = CUDA
        return node

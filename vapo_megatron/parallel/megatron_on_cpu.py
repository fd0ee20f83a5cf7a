"""Makes megatron-core run on a CPU by translating its source at import.

megatron-core refers to CUDA all over its source. Without a GPU, an import hook translates these
references when `megatron.core.*` is compiled; nothing in torch and no file on disk changes:

    torch.cuda, torch.compile          the stand-in cpu_cuda.py (`from torch.cuda import`, too)
    "cuda", "torch.cuda.FloatTensor"   "cpu", "torch.FloatTensor" (whole string constants)
    x.cuda(...)                        x.cpu()

Transformer Engine and apex, whose kernels need a GPU and which megatron-core takes wherever it can
import them, are hidden from the whole process: on a GPU machine a process that computes on the CPU
(`CUDA_VISIBLE_DEVICES=`) would otherwise end at Transformer Engine's FusedAdam.

`vapo_megatron.parallel` installs the hook when it is imported, which loads neither torch nor
megatron-core: whether there is a GPU is asked when megatron-core itself is imported. Only modules
that have imported `vapo_megatron.parallel` may import megatron, so that the hook is always in place
first; processes that megatron-core spawns get it through the program's entry module.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import marshal
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

from vapo_megatron.parallel import libraries, megatron_versions

PACKAGE = "megatron.core"
_CPU_CUDA = "vapo_megatron.parallel.cpu_cuda"
_STAND_IN = "_vapo_cpu_cuda"
_TRANSLATION = hashlib.blake2b(
    importlib.util.MAGIC_NUMBER + Path(__file__).read_bytes(), digest_size=16
).digest()
"""Identifies this file's version, so that a change of it invalidates the caches."""


def install() -> None:
    """Install the hook; may be called twice."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        assert PACKAGE not in sys.modules or has_gpu(), (
            f"{PACKAGE} was imported before vapo_megatron.parallel: too late to translate it"
        )
        sys.meta_path.insert(0, _Finder())


def has_gpu() -> bool:
    """Return whether CUDA sees a GPU; loads torch."""
    import torch

    return torch.cuda.is_available()


def _hide_gpu_libraries() -> None:
    """Let `import` find none of them, unless one is imported already (a stand-in for a CPU)."""
    for name in libraries.OPTIONAL:
        sys.modules.setdefault(name.split(".")[0], None)  # type: ignore[arg-type]


def _quieten() -> None:
    """Filter warnings about missing GPU libraries and deprecated names."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\b")
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logging.getLogger(f"{PACKAGE}.tensor_parallel.random").addFilter(_is_not_about_cpu_rng)


def _is_not_about_cpu_rng(record: logging.LogRecord) -> bool:
    """Filter a warning at every use of the RNG tracker, whose generator is the CPU's here."""
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


class _Finder(importlib.abc.MetaPathFinder):
    """Loads the modules of megatron.core with a translating loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        if fullname == PACKAGE:
            libraries.check_driver()
            if not has_gpu():
                _hide_gpu_libraries()
            libraries.check_imports()
            megatron_versions.quieten_notices()
        if has_gpu():
            return None
        if fullname == PACKAGE:
            _quieten()
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Caches translated bytecode beside Python's own, under names that Python never reads."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        digest = hashlib.blake2b(source, key=_TRANSLATION, digest_size=16).digest()
        cache = importlib.util.cache_from_source(path, optimization="vapocpu")
        with contextlib.suppress(OSError):
            data = self.get_data(cache)
            if data[:16] == digest:
                return marshal.loads(data[16:])
        code = _translated(source, path)
        if not sys.dont_write_bytecode:
            self.set_data(cache, digest + marshal.dumps(code))
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[_STAND_IN] = importlib.import_module(_CPU_CUDA)
        super().exec_module(module)


def _translated(source: bytes, path: str) -> CodeType:
    with warnings.catch_warnings():
        # From 3.12 on Python shows users the backslashes of megatron-core's docstrings.
        warnings.simplefilter("ignore")
        tree = ast.fix_missing_locations(_Translator().visit(ast.parse(source, path)))
        return compile(tree, path, "exec", dont_inherit=True)


class _Translator(ast.NodeTransformer):
    """The table in the module's docstring."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        value = node.value
        if value == "cuda":
            value = "cpu"
        elif isinstance(value, str) and re.fullmatch(r"torch\.cuda\.\w+Tensor", value):
            value = value.replace("torch.cuda.", "torch.")
        return ast.copy_location(ast.Constant(value), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "torch":
            if node.attr == "cuda":
                return ast.copy_location(ast.Name(_STAND_IN, node.ctx), node)
            if node.attr == "compile":
                node.value.id = _STAND_IN
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            node.func.attr, node.args, node.keywords = "cpu", [], []
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module == "torch.cuda":
            node.module = _CPU_CUDA
        return node

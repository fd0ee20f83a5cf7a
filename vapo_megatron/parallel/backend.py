"""Which device this process computes on, and megatron-core made to run on a CPU.

megatron-core names CUDA all over its source. Where no GPU exists, `install` puts a hook into the
import system that translates these names while `megatron.core.*` is compiled; nothing in torch and
no file on disk changes:

    torch.cuda, torch.compile          the stand-in cpu_cuda.py (`from torch.cuda import`, too)
    "cuda", "torch.cuda.FloatTensor"   "cpu", "torch.FloatTensor" (whole string constants)
    x.cuda(...)                        x.cpu()

`vapo_megatron.parallel` installs it when it is imported. Only modules that have imported
`vapo_megatron.parallel` may import megatron, so that the hook is always in place first; processes
that megatron-core spawns get it through the program's entry module.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import marshal
import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

import torch
import torch.distributed as dist

from vapo_megatron.errors import ConfigError
from vapo_megatron.parallel import cpu_cuda, store

PACKAGE = "megatron.core"
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_STAND_IN = "_vapo_cpu_cuda"
_TRANSLATION = hashlib.blake2b(
    importlib.util.MAGIC_NUMBER + Path(__file__).read_bytes(), digest_size=16
).digest()
"""Identifies what this file makes of a module, so that a change of it invalidates the caches."""


def device() -> torch.device:
    """The device that this process computes on: its own GPU (torchrun's LOCAL_RANK), or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def distributed_backend() -> str:
    """Backend of `torch.distributed`: "nccl" with a GPU, else "gloo"."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def initialize_distributed(timeout_seconds: float) -> None:
    """Join the processes that torchrun started; each takes its own GPU where there is one.

    Args:
        timeout_seconds: longest wait in a collective.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    place, rank, world_size = store.join(timeout_seconds)
    dist.init_process_group(
        distributed_backend(),
        store=place,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_seconds),
    )


def synchronize() -> None:
    """Wait until the GPU has finished what it was given; nothing on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def install() -> bool:
    """Make megatron-core run on a CPU, or give CUDA the setting that it relies on on a GPU.

    Safe to call again.

    Returns:
        True when megatron-core is translated in this process.
    """
    # Read when CUDA starts: kernels run in the order of their launches, so that communication comes
    # before the computation that is to hide it.
    os.environ.setdefault(_CONNECTIONS, "1")
    if torch.cuda.is_available():
        return False
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        assert PACKAGE not in sys.modules, (
            f"{PACKAGE} was imported before vapo_megatron.parallel: too late to translate it"
        )
        sys.meta_path.insert(0, _Finder())
        _quieten()
    return True


def check_launch_order(tp_size: int) -> None:
    """Refuse a setting with which tensor parallelism would not hide its communication.

    megatron-core launches each layer's communication just before the computation that is to hide it
    and relies on kernels running in that order. From Blackwell on they do without the setting.

    Raises:
        ConfigError: names the variable, its value and what it must be.
    """
    value = os.environ.get(_CONNECTIONS)
    if tp_size == 1 or value == "1" or not torch.cuda.is_available():
        return
    if torch.cuda.get_device_capability()[0] < 10:
        raise ConfigError(
            f"environment variable {_CONNECTIONS}={value} must be 1 on this GPU with "
            f"parallel.tensor_model_parallel_size={tp_size}; set it to 1, or unset it, before the "
            "start"
        )


def _quieten() -> None:
    """Drop advice on what is missing for a GPU, and on names that megatron-core will outgrow."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\b")
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    logging.getLogger(f"{PACKAGE}.tensor_parallel.random").addFilter(_is_not_about_cpu_rng)


def _is_not_about_cpu_rng(record: logging.LogRecord) -> bool:
    """Drop a warning about every use of the RNG tracker: here its generator is the CPU's."""
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


class _Finder(importlib.abc.MetaPathFinder):
    """Gives the modules of megatron.core a loader that translates them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Keeps translated bytecode beside Python's own, under names that Python itself never reads."""

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
        module.__dict__[_STAND_IN] = cpu_cuda
        super().exec_module(module)


def _translated(source: bytes, path: str) -> CodeType:
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
            node.module = cpu_cuda.__name__
        return node

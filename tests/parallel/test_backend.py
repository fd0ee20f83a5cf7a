"""megatron-core's translation for the CPU: what is translated, that torch is left alone, caching.

Does not exercise a GPU: that nothing is translated there is tested with torch reporting one. Every
distributed test shows that the translated megatron-core computes correctly.
"""

import ast
import importlib.util
import sys
import warnings

import pytest
import torch

from tests.alone import printed_by
from vapo_megatron.errors import ConfigError
from vapo_megatron.parallel import backend, cpu_cuda, megatron_on_cpu


def run_python(code):
    return printed_by(code).split()


def translate(source):
    return ast.unparse(megatron_on_cpu._Translator().visit(ast.parse(source)))


TABLE = {
    "torch.cuda.current_device()": "_vapo_cpu_cuda.current_device()",
    "from torch.cuda import _lazy_call, device": (
        "from vapo_megatron.parallel.cpu_cuda import _lazy_call, device"
    ),
    "jit_fuser = torch.compile": "jit_fuser = _vapo_cpu_cuda.compile",
    "x = torch.empty(3, device='cuda')": "x = torch.empty(3, device='cpu')",
    "kind == 'torch.cuda.HalfTensor'": "kind == 'torch.HalfTensor'",
    "a = b.grad.cuda(non_blocking=True)": "a = b.grad.cpu()",
    "f(torch.cuda.Stream().cuda())": "f(_vapo_cpu_cuda.Stream().cpu())",
}

KEPT = [
    "x = 'needs cuda'",
    "x = 'torch.cuda.empty_cache is slow'",
    "config.cuda_graph",
    "mine.cuda",
    "x = 'cudagraph'",
    "torch.jit.script(f)",
    "from torch.nn import cuda",
    "x = b'cuda'",
]


@pytest.mark.parametrize("source", TABLE)
def test_translates(source):
    assert translate(source) == TABLE[source]


@pytest.mark.parametrize("source", KEPT)
def test_keeps(source):
    assert translate(source) == source


def test_the_stand_in_does_what_megatron_core_expects():
    torch.manual_seed(1)
    state = cpu_cuda.get_rng_state()
    first = torch.randn(3)
    torch.set_rng_state(state)
    assert torch.equal(first, torch.randn(3))
    cpu_cuda.manual_seed(5)
    again = torch.randn(3)
    torch.manual_seed(5)
    assert torch.equal(again, torch.randn(3))
    assert torch.empty(2, device=cpu_cuda.current_device()).device.type == "cpu"
    cpu_cuda.current_stream().wait_stream(cpu_cuda.current_stream())
    assert cpu_cuda.compile(abs) is abs and cpu_cuda.compile(dynamic=True)(abs) is abs
    # Names that the stand-in lacks come from torch.cuda.
    assert cpu_cuda.OutOfMemoryError is torch.cuda.OutOfMemoryError


@pytest.mark.slow
def test_torch_is_not_patched():
    """Importing megatron-core replaces no function or class of torch."""
    printed = run_python(
        """
        import sys, torch, torch.distributed, torch.cuda.nvtx, torch.cuda.random

        names = [n for n in sys.modules if n == "torch" or n.startswith("torch.")]
        def look():
            return {
                (name, key): value
                for name in names
                for key, value in vars(sys.modules[name]).items()
                if callable(value)
            }
        before = look()
        import vapo_megatron.models.build, vapo_megatron.parallel.groups
        import megatron.core.optimizer, megatron.core.pipeline_parallel
        def changed():
            after = look()
            return [".".join(key) for key in before if after.get(key) is not before[key]]
        print(len(before) > 10000, "megatron.core" in sys.modules, len(changed()))
        torch.cuda.current_device = lambda: 0
        print(*changed())
        """
    )
    assert printed == ["True", "True", "0", "torch.cuda.current_device"]


def test_installing_again_changes_nothing():
    before = list(sys.meta_path)
    megatron_on_cpu.install()
    assert sys.meta_path == before
    assert sum(isinstance(finder, megatron_on_cpu._Finder) for finder in before) == 1


def test_does_nothing_with_a_gpu():
    printed = run_python(
        """
        import importlib.util, torch
        torch.cuda.is_available = lambda: True
        from vapo_megatron.parallel import backend
        print(type(importlib.util.find_spec("megatron.core").loader).__name__)
        print(backend.distributed_backend(), backend.device())
        """
    )
    assert printed == ["SourceFileLoader", "nccl", "cuda:0"]


def test_the_package_loads_no_torch_before_megatron_core_is_asked_for():
    printed = run_python(
        """
        import importlib.util, sys
        import vapo_megatron.parallel
        print("torch" in sys.modules, "megatron" in sys.modules)
        print(type(importlib.util.find_spec("megatron.core").loader).__name__)
        """
    )
    assert printed == ["False", "False", "_Loader"]


def test_device_of_this_machine():
    assert backend.device() == torch.device("cpu")
    assert backend.distributed_backend() == "gloo"


def test_megatron_core_imported_too_early_is_an_error():
    printed = run_python(
        """
        import sys, types
        sys.modules["megatron.core"] = types.ModuleType("megatron.core")
        try:
            import vapo_megatron.parallel
        except AssertionError as error:
            print(str(error).replace(" ", "_"))
        """
    )
    assert printed == [
        "megatron.core_was_imported_before_vapo_megatron.parallel:_too_late_to_translate_it"
    ]


def test_cuda_runs_kernels_in_order_unless_the_user_says_otherwise():
    printed = run_python(
        """
        import os
        name = "CUDA_DEVICE_MAX_CONNECTIONS"
        os.environ.pop(name, None)
        import vapo_megatron.parallel as parallel
        print(os.environ[name])
        os.environ[name] = "8"
        parallel.environment.set_defaults()
        print(os.environ[name])
        """
    )
    assert printed == ["1", "8"]


def test_translated_bytecode_is_cached_until_the_source_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "piece.py"
    path.write_text("where = 'cuda'")
    compiled = []
    plain = megatron_on_cpu._translated

    def counting(source, path):
        compiled.append(path)
        return plain(source, path)

    monkeypatch.setattr(megatron_on_cpu, "_translated", counting)

    def load():
        loader = megatron_on_cpu._Loader("piece", str(path))
        spec = importlib.util.spec_from_file_location("piece", path, loader=loader)
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module.where

    assert [load(), load(), load()] == ["cpu"] * 3
    assert len(compiled) == 1
    path.write_text("where = ['cuda', torch.cuda] if 0 else 'cuda' + '!'")
    assert load() == "cpu!" and len(compiled) == 2
    # Python caches the untranslated module elsewhere.
    names = sorted(file.name for file in (tmp_path / "__pycache__").iterdir())
    assert names == [f"piece.{sys.implementation.cache_tag}.opt-vapocpu.pyc"]


def test_translating_tells_users_nothing_of_the_source():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        megatron_on_cpu._translated(b"'''\\-'''", "piece.py")


@pytest.mark.parametrize(
    ("value", "tp_size", "capability", "refused"),
    [("8", 2, (9, 0), True), ("1", 2, (9, 0), False), ("8", 1, (9, 0), False),
     ("8", 2, (10, 0), False)],
)  # fmt: skip
def test_tensor_parallelism_needs_kernels_in_order(
    monkeypatch, value, tp_size, capability, refused
):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    backend.check_launch_order(tp_size)  # there is no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if refused:
        message = "CUDA_DEVICE_MAX_CONNECTIONS=8 must be 1 .*tensor_model_parallel_size=2; set it"
        with pytest.raises(ConfigError, match=message):
            backend.check_launch_order(tp_size)
    else:
        backend.check_launch_order(tp_size)

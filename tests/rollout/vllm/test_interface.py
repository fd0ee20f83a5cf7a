"""The table of what is used of vLLM: against vLLM's sources, our code, and as it is checked.

The quick tests read the installed CPU build. The slow one downloads two CUDA wheels (640 MB), the
pinned one and the lowest that is supported, and unpacks their Python files: on a GPU another worker
is at work, with one of two model runners.

Not exercised: what a name means (tests/gpu/test_library_sections.py, on a GPU), compiled operators.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.rollout.vllm.source import Source, is_vllms
from vapo_megatron.config import RolloutConfig
from vapo_megatron.config.lora import LoraConfig
from vapo_megatron.rollout.vllm.arguments import engine_arguments
from vapo_megatron.rollout.vllm.interface import (
    ADAPTERS,
    BUILT,
    BUILT_FOR_ROUTES,
    ROUTES,
    SUPPORTED,
    TABLE,
)

ROOT = Path(__file__).resolve().parents[3]
READERS = [
    *(ROOT / "vapo_megatron/rollout/vllm").glob("*.py"),
    *(ROOT / "tools/smoke").glob("*.py"),
]
V1, V2 = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"
EVERY = (*TABLE, *ROUTES, *ADAPTERS)
LAST = {row.name.rpartition(".")[2] for row in EVERY}
TAKES = {
    row.name: {name for other in EVERY if other.name == row.name for name in other.takes}
    for row in EVERY
}

IMPORTS = """
import vapo_megatron.rollout.vllm.engine
import vllm.v1.worker.gpu.model_runner, vllm.v1.worker.gpu_model_runner, vllm.v1.worker.gpu_worker
from vllm.platforms import current_platform
print(vllm.__file__, vllm.__version__, current_platform.is_cpu())
"""


def pinned():
    """vLLM's version on a GPU."""
    return re.search(r"^vllm==(\S+)$", (ROOT / "requirements/gpu.txt").read_text(), re.M)[1]


def lowest():
    """The lowest supported one."""
    return re.match(r">=([\d.]+),", SUPPORTED)[1] + ".0"


@pytest.fixture(scope="module")
def installed():
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations
    return Source(Path(folder).parent)


def complaints(source, table=EVERY):
    return [said for row in table for said in source.complaints(row)]


def test_the_installed_vllm_has_every_name(installed):
    assert complaints(installed) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", [pinned(), lowest()])
def test_the_cuda_wheel_has_every_name(tmp_path, version):
    """A download of 320 MB; the Python files alone are unpacked."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 28, 31, 35)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"--dest={tmp_path}"]
    command += ["--only-binary=:all:", "--python-version=3.12", *platforms, f"vllm=={version}"]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [n for n in archive.namelist() if n.endswith(".py")])
    wheel.unlink()
    assert complaints(Source(tmp_path), EVERY if version == pinned() else TABLE) == []
    # Imported, its classes are checked as on a GPU.
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [str(tmp_path / "vllm/__init__.py"), version, "False"]


@pytest.mark.parametrize(
    ("module", "old", "new", "said"),
    [
        (V2, "self.model", "self.net", f"{V2}:GPUModelRunner.model: there is no model"),
        (V1, "self.model", "self.net", f"{V1}:GPUModelRunner.model: there is no model"),
        (
            "vllm.v1.worker.gpu_worker", "def sleep(self, level", "def sleep(self, depth",
            "vllm.v1.worker.gpu_worker:Worker.sleep does not take level",
        ),
        (
            "vllm.v1.engine.core_client", "_finalizer", "_closer",
            "vllm.v1.engine.core_client:InprocClient._finalizer: there is no _finalizer",
        ),
        (
            "vllm.v1.executor.abstract", '"weights"', '"parameters"',
            "vllm.v1.executor.abstract:SLEEP_TAGS does not hold weights",
        ),
        (
            "vllm.distributed.parallel_state", "    destroy_distributed_environment()", "    pass",
            "vllm.distributed.parallel_state:cleanup_dist_env_and_memory does not use "
            "destroy_distributed_environment",
        ),
        (
            "vllm.v1.worker.gpu.sample.sampler", "in PROCESSED_LOGPROBS_MODES", "in ()",
            "vllm.v1.worker.gpu.sample.sampler:Sampler.__call__ does not use "
            "PROCESSED_LOGPROBS_MODES",
        ),
        (
            "vllm.sampling_params", "flat_logprobs:", "flat:",
            "vllm.sampling_params:SamplingParams does not take flat_logprobs",
        ),
        (
            "vllm.inputs.engine", "def tokens_input", "def token_inputs",
            "vllm.inputs.engine:tokens_input: there is no tokens_input",
        ),
    ],
)  # fmt: skip
def test_a_name_that_has_changed_is_seen(installed, module, old, new, said):
    text = installed.text(module)
    assert old in text
    assert complaints(installed.with_text(module, text.replace(old, new))) == [said]


def test_a_module_that_has_moved_is_seen(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("LLM = SamplingParams = RequestOutput = None")
    assert "there is no module vllm.sampling_params" in complaints(Source(tmp_path))


def chain(node):
    """Names of an attribute of attributes of a name, or nothing."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [*([node.id] if isinstance(node, ast.Name) else []), *names[::-1]]


def names_in(tree):
    """MODULE:NAME of each name of vLLM's modules that code refers to."""
    aliases, found = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname or a.name: a.name for a in node.names if is_vllms(a.name)}
        elif isinstance(node, ast.ImportFrom) and is_vllms(node.module):
            found |= {f"{node.module}:{a.name}" for a in node.names}
    for node in ast.walk(tree):
        first, *rest = chain(node) or [None]
        if first in aliases and rest:
            found.add(f"{aliases[first]}:{'.'.join(rest)}")
    return found


@pytest.mark.parametrize("path", READERS, ids=lambda p: p.stem)
def test_the_table_has_what_is_imported_and_replaced(path):
    known = {row.name for row in EVERY}
    for name in names_in(ast.parse(path.read_text())) - {"vllm:__version__"}:
        # A value's attribute is a row of its class.
        value, _, attribute = name.rpartition(".")
        is_values = value in known and attribute in LAST
        assert is_values or any(f"{k}.".startswith(f"{name}.") for k in known), name


def test_the_table_has_what_the_engine_calls_and_reads():
    room = ROOT / "vapo_megatron/rollout/vllm"
    files = (room / name for name in ("engine.py", "running.py", "completions.py"))
    tree = ast.parse("\n".join(file.read_text() for file in files))
    chains = [chain(node) for node in ast.walk(tree)]
    walked = {name for path in (*BUILT, *BUILT_FOR_ROUTES) for name in path.split(".")}
    # `engine` is the name of self._llm.llm_engine there.
    called = {n for c in chains if c[:2] == ["self", "_llm"] for n in c[2:]}
    called |= {n for c in chains if c[:1] == ["engine"] for n in c[1:]}
    assert "reset_prefix_cache" in called and "step" in called
    called |= {n for c in chains if c[:1] == ["state"] for n in c[1:]}
    assert "make_request_output" in called and "request_states" in called
    assert called - LAST - walked == set()
    for variable, name in {
        "completion": "vllm.outputs:CompletionOutput",
        "output": "vllm.outputs:RequestOutput",
        "flat": "vllm.logprobs:FlatLogprobs",
    }.items():
        assert {c[1] for c in chains if c[:1] == [variable] and c[1:]} == TAKES[name], name
    (call,) = (
        n for n in ast.walk(tree) if getattr(getattr(n, "func", 0), "id", 0) == "SamplingParams"
    )
    assert {k.arg for k in call.keywords} == TAKES["vllm.sampling_params:SamplingParams"]


def test_the_table_has_the_engines_arguments_and_the_environments_names(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    keys = set(
        engine_arguments(
            "",
            RolloutConfig(),
            1,
            dtype="bfloat16",
            seed=0,
            offload=True,
            on_cpu=False,
            returns_routes=True,
            adapters=LoraConfig(rank=8),
        )
    )
    assert keys == TAKES["vllm.engine.arg_utils:EngineArgs"]
    files = ("rollout/vllm/engine.py", "parallel/environment.py")
    text = "".join((ROOT / "vapo_megatron" / file).read_text() for file in files)
    used = set(re.findall(r'"(VLLM_\w+)"', text))
    (known,) = (row.holds for row in TABLE if row.name == "vllm.envs:environment_variables")
    assert used == set(known)


def test_the_range_is_the_extras():
    assert f'"vllm{SUPPORTED}"' in (ROOT / "setup.py").read_text()

"""What a worker process of test_interface.py does to the vLLM that it has imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.rollout.vllm.engine_jobs import build_engine, config, error_of
from tests.weights.tiny_hf import write_tiny_model


def without_names(tmp: Path) -> tuple[str, dict[str, str]]:
    """World 1: what is said of vLLM as it is, and, by what it lacks, of one that lacks it."""
    from vllm.envs import environment_variables

    from vapo_megatron.rollout.vllm import engine
    from vapo_megatron.rollout.vllm.interface import check_imports

    groups = "vllm.distributed.parallel_state"
    cleanup, destroy = "cleanup_dist_env_and_memory", "destroy_distributed_environment"
    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr("vllm.inputs.engine.tokens_input")
        patch.delitem(sys.modules, engine.__name__)
        imported = error_of(importlib.import_module, engine.__name__)
        said["vllm.inputs.engine:tokens_input"] = imported
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vllm.inputs.engine", None)
        said["vllm.inputs.engine"] = error_of(check_imports)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.engine.arg_utils.EngineArgs", lambda model: None)
        name = "vllm.engine.arg_utils:EngineArgs(skip_tokenizer_init=)"
        said[name] = error_of(check_imports)
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(environment_variables, "VLLM_NO_USAGE_STATS")
        name = "'VLLM_NO_USAGE_STATS' in vllm.envs:environment_variables"
        said[name] = error_of(check_imports)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{groups}.{cleanup}", lambda: None)
        said[f"{groups}:{destroy} in {groups}:{cleanup}"] = error_of(check_imports)

    path = write_tiny_model(tmp, num_layers=1, heads=2, vocab=64)
    runner, worker = SimpleNamespace(), SimpleNamespace()
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    core = SimpleNamespace(_finalizer=SimpleNamespace(atexit=True))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core, model_executor=executor))
    worker.model_runner = runner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "LLM", lambda **_: llm)
        said["types:SimpleNamespace.model"] = error_of(build_engine, path, config(tmp, 1))
        runner.model = None
        said["types:SimpleNamespace.sleep"] = error_of(build_engine, path, config(tmp, 1))
    return error_of(check_imports), said

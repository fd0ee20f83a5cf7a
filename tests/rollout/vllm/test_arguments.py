"""What vLLM is built with on a GPU and on a CPU. vLLM itself is not asked (test_engine.py)."""

import pytest

from vapo_megatron.config import RolloutConfig
from vapo_megatron.rollout.vllm.arguments import CPU_KV_CACHE_BYTES, engine_arguments


def arguments(on_cpu, offload=True, **rollout):
    return engine_arguments(
        "model", RolloutConfig(**rollout), 100,
        dtype="bfloat16", seed=0, offload=offload, on_cpu=on_cpu,
    )  # fmt: skip


def test_a_gpu_has_graphs_and_sleep_and_measures_its_cache():
    found = arguments(on_cpu=False)
    assert found["enable_sleep_mode"] and not found["enforce_eager"]
    assert found["kv_cache_memory_bytes"] is None and found["gpu_memory_utilization"] == 0.5
    assert not arguments(on_cpu=False, offload=False)["enable_sleep_mode"]
    assert found["hf_overrides"] == {"head_dtype": "float32"}


def test_a_cpu_has_neither():
    found = arguments(on_cpu=True)
    assert not found["enable_sleep_mode"] and found["enforce_eager"]
    assert found["kv_cache_memory_bytes"] == CPU_KV_CACHE_BYTES
    assert found["enable_chunked_prefill"] is False
    assert found["hf_overrides"] == {}


@pytest.mark.parametrize("on_cpu", [True, False])
def test_settings_win(on_cpu):
    found = arguments(on_cpu, kv_cache_bytes=77, enforce_eager=not on_cpu)
    assert found["kv_cache_memory_bytes"] == 77
    assert found["enforce_eager"] is not on_cpu

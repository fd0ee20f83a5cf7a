"""What vLLM is built with on a GPU and on a CPU. vLLM itself is not asked (test_engine.py)."""

import pytest

from vapo_megatron.config import RolloutConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.rollout.vllm import extra_arguments
from vapo_megatron.rollout.vllm.arguments import CPU_KV_CACHE_BYTES, engine_arguments
from vapo_megatron.rollout.vllm.extra_arguments import check_extra_arguments, engine_fields


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


@pytest.mark.parametrize("on_cpu", [True, False])
def test_routes_are_asked_for_only_where_they_are_replayed(on_cpu):
    given = dict(dtype="bfloat16", seed=0, offload=False, on_cpu=on_cpu)
    plain = engine_arguments("model", RolloutConfig(), 100, **given)
    found = engine_arguments("model", RolloutConfig(), 100, **given, returns_routes=True)
    more = {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    assert not plain.keys() & more.keys() and found == {**plain, **more}


NO_FUSION = {"pass_config": {"fuse_allreduce_rms": False}}


@pytest.mark.parametrize(("value", "expected"), [("0", NO_FUSION), ("1", None), ("2", None)])
def test_one_switch_turns_off_the_fusion_that_binds_multicast_memory(monkeypatch, value, expected):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", value)
    assert arguments(on_cpu=False).get("compilation_config") == expected
    assert "compilation_config" not in arguments(on_cpu=True)


def test_further_arguments_are_merged_into_ours(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    extra = {"max_num_batched_tokens": 4096, "compilation_config": {"level": 1}}
    found = arguments(on_cpu=False, vllm_args=extra, kv_cache_dtype="fp8")
    assert found["max_num_batched_tokens"] == 4096 and found["kv_cache_dtype"] == "fp8"
    assert found["compilation_config"] == {"level": 1, **NO_FUSION}
    ours = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": True}}}
    assert arguments(on_cpu=False, vllm_args=ours)["compilation_config"] == {
        "pass_config": {"fuse_allreduce_rms": True}
    }


def test_the_installed_vllm_names_its_arguments():
    """Against the class itself, which a process that checks a configuration never imports."""
    from vllm.engine.arg_utils import EngineArgs

    public = {name for name in EngineArgs.__dataclass_fields__ if not name.startswith("_")}
    assert set(engine_fields()) == public and len(public) > 100


@pytest.mark.parametrize(
    "given",
    [
        {"max_num_batched_tokens": 16384},
        {"max_num_batched_tokens": None},
        {"async_scheduling": False},
        {"watermark": 0.02},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"cudagraph_capture_sizes": [1, 2]},
        {"compilation_config": {"level": 3}},
        {"sleep_mode_offload_cudagraph": True},
        {},
    ],
)
def test_arguments_of_vllm_pass(given):
    check_extra_arguments(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_batched_tokens": 1}, "no argument max_batched_tokens; did you mean max_num_batched"),
        ({"xyzzy": 1}, "has no argument xyzzy; remove it"),
        ({"max_num_batched_tokens": "many"}, "='many' must be of type int | None; change it"),
        ({"max_num_batched_tokens": True}, "=True must be of type int | None"),
        ({"async_scheduling": "yes"}, "='yes' must be of type bool | None"),
        ({"cudagraph_capture_sizes": [1, "2"]}, "must be of type list[int] | None"),
        ({"compilation_config": 3}, "compilation_config=3 must be of type CompilationConfig"),
    ],
)
def test_other_names_and_types_are_refused(given, message):
    with pytest.raises(ConfigError) as error:
        check_extra_arguments(given)
    assert message in str(error.value) and str(error.value).startswith("rollout.vllm_args: ")


def test_without_vllm_nothing_is_checked(monkeypatch):
    monkeypatch.setattr(extra_arguments, "engine_fields", dict)
    check_extra_arguments({"xyzzy": 1})

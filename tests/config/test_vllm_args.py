"""What rollout.vllm_args and kv_cache_dtype refuse by the configuration alone, and what is advised.

Not exercised: what vLLM does with them (tests/rollout/vllm).
"""

import pytest

from vapo_megatron.config import load_config
from vapo_megatron.config.vllm_args import FIELDS, KEPT, advice
from vapo_megatron.errors import ConfigError
from vapo_megatron.rollout.vllm.arguments import engine_arguments
from vapo_megatron.rollout.vllm.extra_arguments import engine_fields


def load(*overrides):
    return load_config([], ["model.hf_path=x", *overrides])


@pytest.mark.parametrize(("name", "field"), FIELDS.items())
def test_what_a_field_sets_is_refused_with_the_field(name, field):
    with pytest.raises(ConfigError, match=rf"{name}=1 is set by the trainer; use {field}, and"):
        load(f"rollout.vllm_args={{{name}: 1}}")


@pytest.mark.parametrize(("name", "reason"), KEPT.items())
def test_what_the_trainer_relies_on_is_refused_with_the_reason(name, reason):
    with pytest.raises(ConfigError) as error:
        load(f"rollout.vllm_args={{{name}: 1}}")
    assert str(error.value) == f"rollout.vllm_args: {name}=1 must not be set: {reason}; remove it"


def test_every_argument_that_is_passed_is_refused_except_the_one_that_is_merged():
    passed = engine_arguments(
        "", load().rollout, 1, dtype="bfloat16", seed=0, offload=True, on_cpu=True
    )
    assert set(passed) <= {*FIELDS, *KEPT} <= set(engine_fields())
    assert not {*FIELDS} & {*KEPT}


def test_others_are_kept_as_they_are():
    given = load("rollout.vllm_args={max_num_batched_tokens: 4096, watermark: 0.1}")
    assert given.rollout.vllm_args == {"max_num_batched_tokens": 4096, "watermark": 0.1}
    one = load("rollout.vllm_args.max_num_batched_tokens=4096")
    assert one.rollout.vllm_args == {"max_num_batched_tokens": 4096}


def test_a_draft_model_is_refused():
    load("rollout.vllm_args={speculative_config: {method: ngram, num_speculative_tokens: 3}}")
    with pytest.raises(ConfigError, match="must have method=ngram, found eagle: a draft model's"):
        load("rollout.vllm_args={speculative_config: {method: eagle, model: x}}")


def test_fp8_keys_and_values_need_16_bits():
    load("rollout.kv_cache_dtype=fp8", "rollout.dtype=bfloat16", "model.dtype=float32")
    with pytest.raises(ConfigError, match="kv_cache_dtype=fp8 needs vLLM's weights in bfloat16"):
        load("rollout.kv_cache_dtype=fp8", "rollout.dtype=float32")
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        load("rollout.kv_cache_dtype=int4")


def test_with_fp8_a_correction_is_advised():
    fp8 = "rollout.kv_cache_dtype=fp8"
    (line,) = advice(load(fp8))
    assert line.startswith("rollout.kv_cache_dtype=fp8 ") and line.endswith(
        "sampler_correction=tis"
    )
    assert advice(load()) == []
    for setting in (
        "algorithm.sampler_correction=tis",
        "algorithm.sampler_correction=icepop",
        "rollout.behaviour=sampler",
        "algorithm.policy_loss=dis",
    ):
        assert advice(load(fp8, setting)) == []

"""config.json -> ModelShape, parameter counts, vocabulary padding, and what is refused.

Does not exercise that the shape is computed right: test_parity.py does.
"""

import json
import math

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.models import published
from tests.models.built import write_hf
from tests.models.qwen25 import COUNTS, SHAPES, config_json
from vapo_megatron.config import ParallelConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import Experts, padded_vocab_size, read_model_shape
from vapo_megatron.models.layout_rules import check_layout
from vapo_megatron.weights.table import parameter_count


def shape_of(tmp_path, changes=None, family="qwen2"):
    return read_model_shape(write_hf(tmp_path, changes, family=family))


def test_every_field(tmp_path):
    shape = shape_of(tmp_path, {"rms_norm_eps": 1e-5, "max_position_embeddings": 777})
    assert (shape.family, shape.hidden_size, shape.num_layers) == ("qwen2", 64, 4)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (4, 2, 16)
    assert (shape.ffn_hidden_size, shape.vocab_size, shape.tied) == (96, 300, False)
    assert (shape.norm_eps, shape.max_position_embeddings) == (1e-5, 777)
    assert (shape.rope_theta, shape.rope_scaling) == (10000.0, None)
    assert (shape.qkv_bias, shape.qk_norm, shape.initializer_range) == (True, False, 0.02)


ROPES = {
    "older": {"rope_theta": 5e5, "rope_scaling": None},
    "older, yarn": {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    },
    "newer": {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    "newer, yarn": {
        "rope_theta": None,
        "rope_parameters": {
            "rope_theta": 5e5,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "length beside": {
        "rope_theta": 5e5,
        "original_max_position_embeddings": 128,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_both_ways_of_writing_rope(name, tmp_path):
    shape = shape_of(tmp_path, ROPES[name])
    assert shape.rope_theta == 5e5
    if name in ("older", "newer"):
        assert shape.rope_scaling is None
    else:
        assert shape.rope_scaling == {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
        }  # fmt: skip


def test_reads_what_transformers_writes(tmp_path):
    config = Qwen2Config(
        **config_json("0.5B"),
        rope_parameters={"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0},
    )
    config.save_pretrained(tmp_path)
    shape = read_model_shape(tmp_path)
    assert shape.rope_theta == 1e6 and shape.rope_scaling["factor"] == 2.0
    assert shape.tied and shape.num_layers == 24


@pytest.mark.parametrize("config_class", [Qwen2Config, Qwen3Config, Qwen3MoeConfig, LlamaConfig])
def test_defaults_are_transformers(config_class, tmp_path):
    """Of keys that config.json lacks, sizes aside."""
    tree = {"num_attention_heads": 64, "hidden_size": 2048, "vocab_size": 100}
    tree |= {"num_hidden_layers": 1, "intermediate_size": 1}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": config_class.model_type, **tree})
    )
    shape, config = read_model_shape(tmp_path), config_class(**tree)
    assert shape.num_key_value_heads == config.num_key_value_heads
    assert shape.head_dim == getattr(config, "head_dim", 2048 // 64)
    assert shape.max_position_embeddings == config.max_position_embeddings
    assert (shape.norm_eps, shape.tied) == (config.rms_norm_eps, config.tie_word_embeddings)
    assert shape.initializer_range == config.initializer_range
    assert (shape.rope_theta, shape.rope_scaling) == (config.default_theta, None)
    if shape.experts is not None:
        assert shape.experts == Experts(
            config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size,
            config.norm_topk_prob, (0,),
        )  # fmt: skip


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_null_key_value_heads_are_the_heads(family, tmp_path):
    path = tmp_path / "config.json"
    write_hf(tmp_path, family=family)
    tree = {**json.loads(path.read_text()), "num_key_value_heads": None}
    path.write_text(json.dumps(tree))
    assert read_model_shape(tmp_path).num_key_value_heads == 4


def test_which_layers_have_experts_is_transformers(tmp_path):
    from transformers import Qwen3MoeForCausalLM

    sizes = dict(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=2, vocab_size=64,
        num_hidden_layers=6, intermediate_size=48, moe_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    for every, dense, norm in ((1, [], True), (2, [], False), (1, [0, 3], True), (3, [5], True)):
        config = Qwen3MoeConfig(
            **sizes, decoder_sparse_step=every, mlp_only_layers=dense, norm_topk_prob=norm
        )
        config.save_pretrained(tmp_path)
        layers = Qwen3MoeForCausalLM(config).model.layers
        with_experts = [i for i, one in enumerate(layers) if hasattr(one.mlp, "experts")]
        shape = read_model_shape(tmp_path)
        assert list(shape.expert_layers) == with_experts and shape.experts.normalized is norm
        assert sorted([*shape.expert_layers, *shape.dense_layers]) == list(range(6))
        model = Qwen3MoeForCausalLM(config)
        assert parameter_count(shape) == sum(p.numel() for p in model.parameters())


REFUSED_EXPERTS = {
    "num_experts_per_tok=9: must be at most num_experts=8": {"num_experts_per_tok": 9},
    "norm_topk_prob='yes': must be true or false": {"norm_topk_prob": "yes"},
    "mlp_only_layers=3: must be a list": {"mlp_only_layers": 3},
    "leaves no layer with experts": {"decoder_sparse_step": 4, "mlp_only_layers": [3]},
    "num_experts=0: must be a positive integer": {"num_experts": 0},
    "output_router_logits=True: only": {"output_router_logits": True},
    "n_shared_experts=1: only": {"n_shared_experts": 1},
}


@pytest.mark.parametrize("message", REFUSED_EXPERTS)
def test_experts_that_are_not_there(message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        shape_of(tmp_path, REFUSED_EXPERTS[message], family="qwen3_moe")


@pytest.mark.parametrize(
    ("message", "family", "parallel"),
    [
        (
            "expert_model_parallel_size=2 needs a model with experts",
            "qwen2", {"expert_model_parallel_size": 2},
        ),
        (
            "expert_model_parallel_size=3 must divide the model's num_experts=8",
            "qwen3_moe", {"expert_model_parallel_size": 3},
        ),
        (
            "tensor_model_parallel_size=2 with a model that has experts needs sequence_parallel",
            "qwen3_moe", {"tensor_model_parallel_size": 2},
        ),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit_experts(message, family, parallel, tmp_path):
    with pytest.raises(ConfigError, match=message):
        check_layout(shape_of(tmp_path, family=family), ParallelConfig(**parallel))


REFUSED = {
    "model_type": {"model_type": "mistral"},
    "hidden_act": {"hidden_act": "gelu"},
    "use_sliding_window": {"use_sliding_window": True},
    "attention_dropout": {"attention_dropout": 0.1},
    "hidden_size": {"hidden_size": "64"},
    "num_hidden_layers": {"num_hidden_layers": 0},
    "vocab_size": {"vocab_size": None},
    "num_key_value_heads": {"num_key_value_heads": 3},
    "num_attention_heads": {"hidden_size": 66},
    "rope_type": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn rope scaling's factor": {"rope_scaling": {"rope_type": "yarn"}},
    "llama3 rope scaling's high_freq_factor": {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    },
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "dual_chunk_attention_config": {"dual_chunk_attention_config": {"chunk_size": 8}},
    "layer_types": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "attention_bias": {"model_type": "qwen3", "attention_bias": True},
    "attention_bias=True": {"model_type": "llama", "attention_bias": True},
    "mlp_bias": {"model_type": "llama", "mlp_bias": True},
    "sliding_window": {"model_type": "llama", "sliding_window": 128},
    "num_attention_heads=64": {
        "model_type": "qwen3", "num_attention_heads": 64, "num_key_value_heads": 3,
        "architectures": None,
    },
}  # fmt: skip


def test_refuses_by_name(subtests, tmp_path):
    for name in REFUSED:
        with subtests.test(name=name):
            with pytest.raises(ConfigError, match=name) as error:
                shape_of(tmp_path, REFUSED[name])
            assert "config.json" in str(error.value)


OTHERS = (
    "qwen2_moe", "qwen3_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral",
    "mixtral", "gemma2", "gemma3", "llama4", "mllama", "phi3", "deepseek_v3", "gpt_oss", "Qwen2",
    ["qwen2"], 3, None,
)  # fmt: skip


def test_other_families_are_refused_with_those_known(subtests, tmp_path):
    for name in OTHERS:
        with subtests.test(name=name):
            with pytest.raises(ConfigError) as error:
                shape_of(tmp_path, {"model_type": name})
            assert f"model_type={name!r}: must be one of qwen2, qwen3, qwen3_moe, llama" in str(
                error.value
            )


def test_refuses_what_is_no_directory_of_a_model(tmp_path):
    with pytest.raises(ConfigError, match="model.hf_path=.*/nothing does not exist; set"):
        read_model_shape(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="--hf=.*config.json: No such file"):
        read_model_shape(tmp_path, "--hf")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold an object"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not JSON: maximum recursion depth"):
        read_model_shape(tmp_path)


def test_whatever_stands_under_a_key_is_taken_or_refused_by_name(tmp_path):
    """What is accepted is a number wherever a number is computed with."""
    tree = {"model_type": "qwen2", **config_json("0.5B"), "initializer_range": 0.02}
    tree |= {"rope_theta": 1e6, "rope_scaling": None, "layer_types": ["full_attention"] * 24}
    tree |= {"rope_parameters": None, "head_dim": 64, "use_sliding_window": False}
    odd = ["x", "1", [], [[1]], {}, {"rope_type": []}, {"rope_theta": "x"}, -1, 0, True, 1.5]
    refused = 0
    for key in tree:
        for value in [*odd, float("inf"), float("nan")]:
            (tmp_path / "config.json").write_text(json.dumps({**tree, key: value}))
            try:
                shape = read_model_shape(tmp_path)
            except ConfigError as error:
                refused += 1
                assert str(error).count("\n") == 0 and "config.json: " in str(error)
            else:
                numbers = (shape.norm_eps, shape.rope_theta, shape.initializer_range)
                assert all(0 < number < math.inf for number in numbers), (key, value)
    assert refused > 130


@pytest.mark.parametrize("name", SHAPES)
def test_parameter_counts_are_transformers(name, tmp_path):
    tree = config_json(name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **tree}))
    shape = read_model_shape(tmp_path)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**tree))
    assert parameter_count(shape) == COUNTS[name] == sum(p.numel() for p in model.parameters())
    # A critic has H value weights in place of an output projection.
    vocabulary = 0 if shape.tied else shape.vocab_size * shape.hidden_size
    critic = COUNTS[name] - vocabulary + shape.hidden_size
    assert parameter_count(shape, value_head=True) == critic


@pytest.mark.parametrize("name", published.MODELS)
def test_published_models_of_other_families(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published.MODELS[name]))
    shape, config = read_model_shape(tmp_path), AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(p.numel() for p in model.parameters())
    assert parameter_count(shape) == published.COUNTS[name] == count
    attention = model.model.layers[0].self_attn
    assert (shape.head_dim, shape.qk_norm) == (attention.head_dim, hasattr(attention, "q_norm"))
    assert shape.norm_eps == model.model.norm.variance_epsilon
    assert shape.rope_theta == config.rope_parameters["rope_theta"]
    if shape.family == "llama":
        rope = {k: v for k, v in config.rope_parameters.items() if k != "rope_theta"}
        assert shape.rope_scaling == rope and rope["rope_type"] == "llama3"


def test_padded_vocab_size(tmp_path):
    shape = shape_of(tmp_path)
    # 300 rows: 3 * 128 = 384, 2 * 256 = 512, already a multiple of 100.
    assert padded_vocab_size(shape, 128, 1) == 384
    assert padded_vocab_size(shape, 128, 2) == 512
    assert padded_vocab_size(shape, 50, 2) == 300


SIX_HEADS = {"num_attention_heads": 6, "hidden_size": 96}
REFUSED_LAYOUTS = {
    "num_attention_heads=4": ({}, {"tensor_model_parallel_size": 8}),
    "intermediate_size=98": ({"intermediate_size": 98}, {"tensor_model_parallel_size": 4}),
    # 2 key-value heads over 3 ranks: neither whole heads nor ranks that share one.
    "tensor_model_parallel_size=3 must be a divisor or a multiple of .*num_key_value_heads=2": (
        SIX_HEADS, {"tensor_model_parallel_size": 3},
    ),
    # 3 ranks share the (3 + 2) * 16 = 80 rows of a key-value head.
    "tensor_model_parallel_size=6 must divide the model's 160 .*head_dim=16": (
        SIX_HEADS, {"tensor_model_parallel_size": 6},
    ),
    "num_hidden_layers=4": ({}, {"pipeline_model_parallel_size": 3}),
    "virtual_pipeline_model_parallel_size=4": (
        {}, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4},
    ),
    "recompute_num_layers=2 must divide the 1 layers of a model chunk .*recompute_method=uniform": (
        {},
        {
            "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
            "recompute": "full", "recompute_num_layers": 2,
        },
    ),
    "recompute_num_layers=3 must not exceed the 2 layers of a model chunk .*recompute_method=bl": (
        {},
        {
            "pipeline_model_parallel_size": 2, "recompute": "full", "recompute_method": "block",
            "recompute_num_layers": 3,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED_LAYOUTS)
def test_layouts_that_do_not_divide(message, tmp_path):
    changes, parallel = REFUSED_LAYOUTS[message]
    with pytest.raises(ConfigError, match=message):
        check_layout(shape_of(tmp_path, changes), ParallelConfig(**parallel))


def test_layouts_that_divide(tmp_path):
    shape = shape_of(tmp_path)
    check_layout(shape, ParallelConfig(tensor_model_parallel_size=2))
    parallel = ParallelConfig(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    )
    check_layout(shape, parallel)
    for kv_heads in (1, 2, 4):
        shape = shape_of(tmp_path, {"num_key_value_heads": kv_heads})
        check_layout(shape, ParallelConfig(tensor_model_parallel_size=4))

"""Which layouts of ranks divide a model. Imports neither torch nor megatron."""

from __future__ import annotations

from vapo_megatron.config import ParallelConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape


def check_layout(shape: ModelShape, parallel: ParallelConfig) -> None:
    """Refuse a layout that does not divide the model.

    Raises:
        ConfigError: names the field, its value, and what the model's config.json says.
    """
    tp_size = parallel.tensor_model_parallel_size
    stages = parallel.pipeline_model_parallel_size
    chunks = stages * (parallel.virtual_pipeline_model_parallel_size or 1)
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    rows = (heads + 2 * groups) * shape.head_dim
    # megatron-core gives each rank whole key-value heads, or cuts each head's query, key and value
    # rows evenly over the ranks that share it, even within a head.
    for is_possible, rule in (
        (heads % tp_size == 0, f"must divide the model's num_attention_heads={heads}; lower"),
        (
            not shape.dense_layers or shape.ffn_hidden_size % tp_size == 0,
            f"must divide the model's intermediate_size={shape.ffn_hidden_size}; lower",
        ),
        (
            groups % tp_size == 0 or tp_size % groups == 0,
            f"must be a divisor or a multiple of the model's num_key_value_heads={groups}; change",
        ),
        (
            rows % tp_size == 0,
            f"must divide the model's {rows} query, key and value rows, (num_attention_heads="
            f"{heads} + 2 * num_key_value_heads={groups}) * head_dim={shape.head_dim}; lower",
        ),
    ):
        if not is_possible:
            raise ConfigError(
                f"parallel.tensor_model_parallel_size={tp_size} {rule} it, and use "
                "pipeline_model_parallel_size instead"
            )
    if shape.num_layers % chunks:
        raise ConfigError(
            f"parallel.pipeline_model_parallel_size={stages} times "
            f"virtual_pipeline_model_parallel_size={chunks // stages} must divide the model's "
            f"num_hidden_layers={shape.num_layers}; change one of them"
        )
    _check_experts(shape, parallel)
    units, method = parallel.recompute_num_layers, parallel.recompute_method
    of_chunk = shape.num_layers // chunks
    if of_chunk % units if method == "uniform" else of_chunk < units:
        rule = "divide" if method == "uniform" else "not exceed"
        raise ConfigError(
            f"parallel.recompute_num_layers={units} must {rule} the {of_chunk} layers of a model "
            f"chunk (num_hidden_layers={shape.num_layers} over {chunks} chunks) with "
            f"recompute_method={method}; change it"
        )


def _check_experts(shape: ModelShape, parallel: ParallelConfig) -> None:
    """Refuse a layout that does not divide the experts; see check_layout."""
    ep_size = parallel.expert_model_parallel_size
    field = f"parallel.expert_model_parallel_size={ep_size}"
    if shape.experts is None:
        if ep_size > 1:
            raise ConfigError(f"{field} needs a model with experts, which this is not; set it to 1")
        return
    if shape.experts.count % ep_size:
        raise ConfigError(
            f"{field} must divide the model's num_experts={shape.experts.count}; change it"
        )
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"parallel.tensor_model_parallel_size={parallel.tensor_model_parallel_size} with a "
            "model that has experts needs sequence_parallel=true, with which tensor-parallel ranks "
            "give the experts different tokens; set it"
        )

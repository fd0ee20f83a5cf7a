"""Actor, critic and reward model as megatron-core models.

Before: the process groups exist (parallel/groups.py). After: this rank holds one GPTModel per
virtual stage, its layers' shards, with random weights.

The last chunk of the last stage differs from a plain GPTModel in what it returns:
  actor                   the hidden states before the output projection, so that logits [S, V]
                          never exist in full; `gather_hidden` makes them [S, H] and `output_weight`
                          is the projection's shard
  critic, reward model    float32 values; value_head.py's `values_of` makes them [S]
Every other chunk returns the hidden states that the next one takes.
"""

from __future__ import annotations

import vapo_megatron.parallel  # noqa: F401  prepares megatron-core for this machine

# isort: split
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vapo_megatron.config import ModelConfig, ParallelConfig
from vapo_megatron.config.phases import Role
from vapo_megatron.models.attention import check_flash_attention, uses_flash_attention
from vapo_megatron.models.context_attention import ContextShards
from vapo_megatron.models.experts import experts_config, mark_experts
from vapo_megatron.models.hf_config import ModelShape, padded_vocab_size
from vapo_megatron.models.layer_spec import (
    RotaryTable,
    block_spec,
    check_fp8,
    uses_transformer_engine,
)
from vapo_megatron.models.layout_rules import check_layout
from vapo_megatron.models.rope import Rotary, rope_frequencies, softmax_scale
from vapo_megatron.models.value_head import ValueHead
from vapo_megatron.parallel.backend import check_launch_order
from vapo_megatron.parallel.backend import device as this_device
from vapo_megatron.parallel.groups import Ranks


def transformer_config(
    shape: ModelShape, model: ModelConfig, parallel: ParallelConfig
) -> TransformerConfig:
    """Translate an HF architecture and the run's layout into megatron-core's configuration.

    Raises:
        ConfigError: the layout does not divide the model, or the layer implementation is missing or
            does not support it.
    """
    check_layout(shape, parallel)
    check_launch_order(parallel.tensor_model_parallel_size)
    check_fp8(shape, model, parallel.tensor_model_parallel_size)
    vpp_size = parallel.virtual_pipeline_model_parallel_size or 1
    virtual = vpp_size > 1
    batched = not virtual if parallel.batch_p2p_comm is None else parallel.batch_p2p_comm
    dtype = getattr(torch, model.dtype)
    on_gpu = this_device().type == "cuda"
    transformer_engine = uses_transformer_engine(model)
    if uses_flash_attention(dtype) and not transformer_engine:
        check_flash_attention(shape.head_dim)
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        softmax_scale=softmax_scale(shape),
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=shape.initializer_range,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=vpp_size if virtual else None,
        context_parallel_size=parallel.context_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        # Packed batches vary in length; even a dense model must name a dispatcher that allows it.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        **experts_config(shape, parallel, on_gpu=on_gpu, transformer_engine=transformer_engine),
        # Only the interleaved schedule overlaps, and only unbatched sends.
        overlap_p2p_comm=virtual and not batched,
        batch_p2p_comm=batched,
        # gloo may still be sending the output.
        deallocate_pipeline_outputs=on_gpu,
        # Losses are already divided by global counts: megatron-core must not average.
        calculate_per_token_loss=True,
        **_recompute(parallel),
        **_fusions(on_gpu, transformer_engine),
        **_fp8(model.fp8),
    )


def _recompute(parallel: ParallelConfig) -> dict[str, Any]:
    """megatron-core's fields for parallel.recompute."""
    if parallel.recompute == "none":
        return {}
    if parallel.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {
        "recompute_granularity": "full",
        "recompute_method": parallel.recompute_method,
        "recompute_num_layers": parallel.recompute_num_layers,
    }


def _fusions(on_gpu: bool, transformer_engine: bool) -> dict[str, Any]:
    """Kernels that exist only on a GPU; none changes what is computed."""
    fused_gradients = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    compiled = on_gpu and _can_compile()
    return {
        "bias_activation_fusion": compiled,
        "bias_dropout_fusion": compiled,
        "apply_rope_fusion": on_gpu and transformer_engine,
        "gradient_accumulation_fusion": on_gpu and fused_gradients,
    }


def _can_compile() -> bool:
    """Are a C compiler and Python's headers there? torch.compile builds its launchers with them."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return bool(compiler) and Path(sysconfig.get_path("include"), "Python.h").exists()


def _fp8(fp8: str | None) -> dict[str, Any]:
    """The layers' matrix products in FP8; parameters, attention and the output stay in bfloat16.

    Tensors are scaled by their current maximum. Delayed scaling keeps a history of maxima: with the
    same weights, log-probabilities would change between old_logprobs and the update, and after a
    resume. Weights are cast again for each microbatch: Transformer Engine's cache of the casts
    would stay on the GPU while the model is offloaded.
    """
    if fp8 is None:
        return {}
    return {"fp8": fp8, "fp8_recipe": "tensorwise", "disable_parameter_transpose_cache": True}


def build_model(
    shape: ModelShape,
    model: ModelConfig,
    parallel: ParallelConfig,
    ranks: Ranks,
    role: Role,
    *,
    seed: int,
    device: torch.device | str | None = None,
) -> list[GPTModel]:
    """Build this rank's chunks, one per virtual stage: random weights, not yet wrapped in DDP.

    Args:
        shape: the architecture, as its HF directory says.
        model: types, kernels, the value head's spread.
        parallel: the layout.
        ranks: from groups.initialize.
        role: what the last stage returns.
        seed: of a critic's value head.
        device: "meta" builds shapes without memory, of local layers alone, as Transformer Engine's
            write their weights on a CPU; None: the device of this process.

    Raises:
        ConfigError: see transformer_config.
    """
    settings = transformer_config(shape, model, parallel)
    where = this_device() if device is None else torch.device(device)
    assert device is None or where.type == "meta", f"device={device} must be None or meta"
    transformer_engine = uses_transformer_engine(model)
    if where.type == "meta":
        assert not transformer_engine, "device=meta needs model.layer_spec=local"
        settings.perform_initialization = False
        settings.use_cpu_initialization = settings.init_model_with_meta_device = True

    frequencies = rope_frequencies(shape)
    shards = None if transformer_engine else _context_shards(shape, settings.params_dtype, ranks)

    def build_chunk(stage: int) -> GPTModel:
        vp_stage = stage if ranks.vpp_size > 1 else None
        last = ranks.is_last_stage and stage == ranks.vpp_size - 1
        chunk = GPTModel(
            config=settings,
            transformer_layer_spec=block_spec(
                settings,
                Rotary(frequencies),
                shards=shards,
                transformer_engine=transformer_engine,
                vp_stage=vp_stage,
            ),
            vocab_size=padded_vocab_size(shape, model.make_vocab_size_divisible_by, ranks.tp_size),
            max_sequence_length=shape.max_position_embeddings,
            pre_process=ranks.is_first_stage and stage == 0,
            post_process=last,
            share_embeddings_and_output_weights=shape.tied and role == "actor",
            position_embedding_type="rope" if transformer_engine else "none",
            rotary_base=shape.rope_theta,
            vp_stage=vp_stage,
        )
        mark_experts(chunk)
        if transformer_engine:
            chunk.rotary_pos_emb = RotaryTable(shape.head_dim, frequencies.to(this_device()))
        if last and role == "actor":
            # Hidden states leave the model: logprobs.py computes scores chunk by chunk.
            chunk.output_layer = OutputProjection(chunk.output_layer, settings)
        elif last:
            chunk.output_layer = ValueHead(settings, model.value_head_init_std, seed)
        return chunk

    with where:
        return [build_chunk(stage) for stage in range(ranks.vpp_size)]


def _context_shards(shape: ModelShape, dtype: torch.dtype, ranks: Ranks) -> ContextShards | None:
    """Of our own attention: Transformer Engine exchanges keys and values itself."""
    if ranks.cp_size == 1:
        return None
    varlen = uses_flash_attention(dtype)
    return ContextShards(ranks.cp_group, softmax_scale(shape), varlen=varlen)


class OutputProjection(tensor_parallel.ColumnParallelLinear):
    """An output projection whose forward returns the hidden states; logprobs.py uses its weight.

    It must be called all the same: with overlap_param_gather, DDP's hook then waits for the weight.
    """

    def __init__(
        self, built: tensor_parallel.ColumnParallelLinear, settings: TransformerConfig
    ) -> None:
        super().__init__(
            built.input_size,
            built.output_size,
            config=settings,
            init_method=settings.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=built.tp_group,
        )
        self.weight = built.weight  # None: tied to the embedding's.

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Return (hidden states, no bias)."""
        return input_, None


def output_weight(chunk: torch.nn.Module) -> Tensor:
    """Return this rank's rows of the actor's output projection [V_padded / tp, H], tied or not.

    The chunk is the last one of the last stage, DDP-wrapped or not.
    """
    model: Any = getattr(chunk, "module", chunk)
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def gather_hidden(output: Tensor, *, sequence_parallel: bool) -> Tensor:
    """The actor's output on the last stage -> hidden states [S, H], the same on all of tp_group.

    Each rank then uses its own rows of the vocabulary, so its gradient of the hidden states is
    partial: backward sums it over tp_group (and scatters the sum under sequence parallelism).

    Args:
        output: what the last chunk returned, [1, S_local, H].
        sequence_parallel: parallel.sequence_parallel.
    """
    hidden = output.reshape(-1, output.size(-1))
    if sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=True
        )
    return tensor_parallel.copy_to_tensor_model_parallel_region(hidden)

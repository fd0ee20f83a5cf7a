"""DDP, the optimizer, its step and its learning rate.

Before: every rank holds its model chunks. After `build_ddp` and `build_optimizer`: gradients are
accumulated in float32 buffers and summed over data-parallel ranks, and each rank updates its shard
of the parameters (with the distributed optimizer) or all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from vapo_megatron.config import OptimizerConfig, ParallelConfig
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.matrix_optimizer import OwnedOptimizer
from vapo_megatron.parallel.matrix_weights import Weight
from vapo_megatron.parallel.optimizer_state import parts_of


def build_ddp(
    chunks: Sequence[torch.nn.Module],
    parallel: ParallelConfig,
    transformer_config: TransformerConfig,
    *,
    whole_gradients: bool = False,
) -> list[DistributedDataParallel]:
    """Wrap each chunk so that its gradients are summed, never averaged, over data-parallel ranks.

    The transformer configuration is completed here with what the pipeline schedule calls. It must
    say calculate_per_token_loss: with it megatron-core scales gradients by 1, without it by 1/dp.

    Args:
        chunks: this rank's, one for each virtual stage, with their initial weights loaded.
        parallel: use_distributed_optimizer and what overlaps.
        transformer_config: of these chunks; each model (actor, critic) needs one of its own.
        whole_gradients: every rank needs them, for an optimizer of matrices.
    """
    assert transformer_config.calculate_per_token_loss, (
        "set calculate_per_token_loss before DDP is built, or gradients are divided by dp_size"
    )
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather and not whole_gradients,
        use_distributed_optimizer=parallel.use_distributed_optimizer and not whole_gradients,
    )
    wrapped = [
        DistributedDataParallel(transformer_config, settings, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        _fuse_weight_gradients(chunk)
    transformer_config.finalize_model_grads_func = _finalize
    if parallel.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        transformer_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def _fuse_weight_gradients(chunk: DistributedDataParallel) -> None:
    """Let Transformer Engine's layers add their weights' gradients to DDP's float32 buffer.

    The product then adds them itself; otherwise it rounds them to bfloat16 for DDP to add. Set here
    and not by megatron-core's gradient_accumulation_fusion, with which its own linear layers, the
    embedding's output projection among them, need apex. Other layers lack the attribute.
    """
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def _finalize(
    chunks: list[torch.nn.Module], num_tokens: Tensor | None = None, **keywords: Any
) -> None:
    """Sum gradients over ranks; skip the division by the number of tokens."""
    finalize_model_grads(chunks, None, **keywords)


def build_optimizer(
    ddp_chunks: Sequence[DistributedDataParallel],
    optimizer: OptimizerConfig,
    role: str,
    weights: Sequence[Weight] | None = None,
    seed: int = 0,
) -> MegatronOptimizer | OwnedOptimizer:
    """Build AdamW over all parameters, or Dion or Muon with AdamW for what is no matrix.

    Biases and norms (1-d parameters) get no weight decay.

    Args:
        ddp_chunks: from build_ddp; they say the parameters' type and what is sharded.
        optimizer: methods, betas, epsilon, weight decay, gradient clipping.
        role: "actor" or "critic": whose method, gradient clip and, until the first update, learning
            rate.
        weights: these parameters, which a method for matrices needs to know.
        seed: of Dion's bases.
    """
    o, ddp, bf16 = optimizer, ddp_chunks[0].ddp_config, ddp_chunks[0].config.bf16
    if role == "actor":
        rate, clip_grad = o.actor_learning_rate, o.actor_clip_grad
    else:
        rate, clip_grad = o.critic_learning_rate, o.critic_clip_grad
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=rate,
        min_lr=0.0,
        weight_decay=o.weight_decay,
        adam_beta1=o.adam_beta1,
        adam_beta2=o.adam_beta2,
        adam_eps=o.adam_eps,
        clip_grad=clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=ddp.use_distributed_optimizer,
        overlap_param_gather=ddp.overlap_param_gather,
    )
    method = optimizer.method(role)
    built: MegatronOptimizer | OwnedOptimizer
    if method == "adamw":
        built = get_megatron_optimizer(settings, list(ddp_chunks))
    else:
        assert weights is not None, f"{method} needs to know which parameters are matrices"
        built = OwnedOptimizer(weights, optimizer, method, groups.current(), settings, seed)
    set_learning_rate(built, rate)
    return built


def set_learning_rate(optimizer: MegatronOptimizer | OwnedOptimizer, learning_rate: float) -> None:
    """Set the rate of the next update, and each group's weight decay.

    megatron-core marks groups without decay by wd_mult=0, for its own scheduler to apply, which is
    not used here.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_mult"]
        group["weight_decay"] = optimizer.config.weight_decay * group["wd_mult"]


def optimizer_step(optimizer: MegatronOptimizer | OwnedOptimizer) -> Tensor:
    """Clip the finished gradients, update the parameters, and drop the gradients.

    Returns:
        float32 0-d on the CPU: norm of the whole model's gradient before clipping, the same on all
        ranks. Where it is not finite, parameters and optimizer state are what they were.
    """
    # The steps of step(), which would apply gradients of any norm outside float16. The norm
    # is reduced once: a second reduction need not give the same bits on a GPU.
    optimizer.prepare_grads()
    total_norm = optimizer.get_grad_norm()
    norm = float(total_norm)  # some versions leave it on the GPU, [1]
    if math.isfinite(norm):
        for part in parts_of(optimizer):
            parameters = [] if getattr(part, "is_stub_optimizer", False) else part.get_parameters()
            if parameters and part.config.clip_grad > 0:
                clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, total_norm)
        assert optimizer.step_with_ready_grads(), "a finite gradient is always applied"
    optimizer.zero_grad()
    return torch.tensor(norm)


def learning_rate(update: int, optimizer: OptimizerConfig, role: str) -> float:
    """Linear warm-up counted in updates, then constant.

    peak * min(1, (update + 1) / warmup_updates): the first update already moves, and update
    warmup_updates - 1 is the first at the peak. Source: VAPO section 5.1.

    Args:
        update: updates that this role made before, 0 for the first; the critic's count from the
            start of value pretraining.
        optimizer: peaks and warm-ups.
        role: "actor" or "critic".
    """
    if role == "actor":
        peak, warmup_updates = optimizer.actor_learning_rate, optimizer.actor_warmup_updates
    else:
        peak, warmup_updates = optimizer.critic_learning_rate, optimizer.critic_warmup_updates
    return peak * min(1.0, (update + 1) / warmup_updates) if warmup_updates else peak

"""How the models and the batch are distributed over ranks, and their memory."""

from __future__ import annotations

from typing import Literal

from vapo_megatron.config.section import Section, field


class ParallelConfig(Section):
    """How the model and the batch are distributed over ranks."""

    world_size: int = field(
        1,
        "Number of processes (one per GPU) that train; torchrun starts these and "
        "rollout.num_processes.",
        ge=1,
    )
    tensor_model_parallel_size: int = field(
        1, "Tensor-parallel size (TP): ranks that share each layer's matrices.", ge=1
    )
    pipeline_model_parallel_size: int = field(
        1, "Pipeline-parallel size (PP): ranks that share the layers.", ge=1
    )
    virtual_pipeline_model_parallel_size: int | None = field(
        None, "Model chunks on each pipeline rank; null: one.", ge=1
    )
    batch_p2p_comm: bool | None = field(
        None,
        "Batched sends and receives between pipeline stages; null: on without virtual stages, off "
        "with them, where batching is unsafe.",
    )
    context_parallel_size: int = field(
        1, "Context-parallel size (CP): ranks that share each sequence.", ge=1
    )
    expert_model_parallel_size: int = field(
        1,
        "Expert-parallel size (EP): ranks that share the experts of each layer; they are those of "
        "tensor, context and data parallelism, which otherwise hold all experts.",
        ge=1,
    )
    sequence_parallel: bool = field(
        False, "Shard activations outside the tensor-parallel regions along the sequence."
    )
    use_distributed_optimizer: bool = field(
        True,
        "Shard optimizer state and float32 main parameters over data-parallel ranks. With Dion and "
        "Muon each matrix is on one of them in any case.",
    )
    overlap_grad_reduce: bool = field(
        False, "Overlap the gradient reduction with the backward pass."
    )
    overlap_param_gather: bool = field(
        False,
        "Overlap the all-gather of updated parameters with the forward pass; needs the distributed "
        "optimizer, and does nothing for Dion and Muon.",
    )
    recompute: Literal["none", "selective", "full"] = field(
        "none", "Activation recomputation in the backward pass."
    )
    recompute_method: Literal["uniform", "block"] = field(
        "uniform",
        "With recompute=full; uniform: all layers, in units of recompute_num_layers whose inputs "
        "are kept; block: only the first recompute_num_layers of each model chunk.",
    )
    recompute_num_layers: int = field(
        1,
        "Layers of a unit (uniform; it must divide a chunk's), or of each chunk that are "
        "recomputed (block).",
        ge=1,
    )
    max_tokens_per_microbatch: int = field(
        32768, "Token budget (prompt + response) of one packed microbatch.", ge=1
    )
    offload: bool | None = field(
        None,
        "Offload idle models to host memory: parameters and optimizer state of each role; an idle "
        "vLLM drops its weights and KV cache; null: true on a GPU.",
    )
    host_memory_gb: float | None = field(
        None,
        "Host memory per node that offload, checkpoints and a step's responses may use, in 1e9 "
        "bytes; null: all that is available.",
        gt=0,
    )
    gpu_memory_gb: float = field(
        80.0,
        "Memory of a GPU in 1e9 bytes, for the plan of --dry-run; a run queries its GPU instead.",
        gt=0,
    )
    timeout_seconds: float = field(
        10800.0, "Timeout of collectives; at least the largest of timeouts.*.", gt=0
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of a model: TP x PP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Ranks that train on different responses: world size / (TP x CP x PP)."""
        return self.world_size // (self.model_parallel_size * self.context_parallel_size)

    @property
    def replica_size(self) -> int:
        """Copies of a model, which reduce gradients and share the optimizer: CP x DP."""
        return self.context_parallel_size * self.data_parallel_size

    @property
    def expert_replica_size(self) -> int:
        """Copies of each expert, which do the same for it: TP x CP x DP / EP."""
        ranks = self.tensor_model_parallel_size * self.replica_size
        return ranks // self.expert_model_parallel_size

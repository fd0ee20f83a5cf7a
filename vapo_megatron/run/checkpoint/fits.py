"""Whether a checkpoint matches a configuration; checked before a run starts and on loading.

Apart from load.py, so that the checks before a run need no megatron-core.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from vapo_megatron.config import AlgorithmConfig, ModelConfig, ParallelConfig
from vapo_megatron.errors import CheckpointError
from vapo_megatron.weights.convert.sharded_files import ShardedReader


def check_roles(directory: Path, held: Collection[str], trained: Collection[str]) -> None:
    """Reject a checkpoint with other roles than those the run trains.

    Raises:
        CheckpointError: names both.
    """
    if set(held) != set(trained):
        raise CheckpointError(
            f"{directory} holds {' and '.join(held)}, but this configuration trains "
            f"{' and '.join(trained)} (algorithm.stage, advantage_estimator); resume with the "
            "run's own configuration, or start another run with logging.run_dir and, for its "
            "critic, model.critic_checkpoint"
        )


def check_optimizer(
    directory: Path,
    role: str,
    model: ModelConfig,
    parallel: ParallelConfig,
    algorithm: AlgorithmConfig,
    *,
    field: str,
    remedy: str,
) -> None:
    """Reject the state of another kind of optimizer than the configuration asks for.

    The distributed optimizer has main parameters for every dtype, the other one only for bfloat16,
    each under its own name.

    Args:
        directory: of the role's distributed checkpoint.
        role: whose optimizer it is.
        model, parallel, algorithm: the run's.
        field: that names the checkpoint, with its value.
        remedy: in place of the settings of the run that wrote it.

    Raises:
        CheckpointError: names the settings on which the state depends.
    """
    keys = [key for key in ShardedReader(directory).tensors if key.startswith("optimizer.state.")]
    kinds = {key.split(".")[2] for key in keys}
    is_distributed = parallel.use_distributed_optimizer
    has_main = model.dtype == "bfloat16" and not is_distributed
    learns_attention = any(".self_attention.linear_proj." in key for key in keys)
    is_frozen = role == "critic" and algorithm.freeze_critic_attention
    if (
        ("param" in kinds) != is_distributed
        or ("fp32_param" in kinds) != has_main
        or learns_attention == is_frozen
    ):
        raise CheckpointError(
            f"{field}: the state of its {role}'s optimizer does not fit this run's "
            f"parallel.use_distributed_optimizer={is_distributed}, model.dtype={model.dtype} and "
            f"algorithm.freeze_critic_attention={algorithm.freeze_critic_attention}; use the "
            f"settings of the run that wrote it, or {remedy}"
        )


CRITIC_REMEDY = "take its weights alone with model.critic_checkpoint_optimizer=false"
"""Of check_optimizer for model.critic_checkpoint."""

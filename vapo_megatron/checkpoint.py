"""Checkpoints of a run: the models that it trains, their optimizers, and where the run stood.

    checkpoints/latest                  name of the newest whole checkpoint, replaced atomically
    checkpoints/step_000010/actor/      megatron-core distributed checkpoint: model and optimizer
    checkpoints/step_000010/critic/
    checkpoints/step_000010/state.json  step, data position, update counters, policy version
    checkpoints/step_000010/rng_0000.pt torch's random state of each rank

Before `save`: every rank holds its shards. After: each has written its own; the directory got its
name when all of it was on disk. Loading reads tensors with weights_only=True, and works for any
layout.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vapo_megatron.config import VapoConfig
from vapo_megatron.errors import CheckpointError
from vapo_megatron.parallel.sharded_state import load_sharded, save_sharded
from vapo_megatron.trained_model import TrainedModel
from vapo_megatron.weights.mapping import wait_for_parameters
from vapo_megatron.weights.sharded_files import ShardedReader


def save(
    root: Path,
    step: int,
    models: Mapping[str, TrainedModel],
    state: Mapping[str, Any],
    *,
    keep_last: int,
) -> None:
    """Write checkpoint `step`, make it the latest, and delete those before the last `keep_last`.

    Args:
        root: directory of the run's checkpoints.
        step: steps that are done.
        models: by role.
        state: what else the run needs to go on; JSON values, the same on every rank.
        keep_last: checkpoints kept, this one included.
    """
    is_main = dist.get_rank() == 0
    final, partial = root / f"step_{step:06d}", root / f"step_{step:06d}.partial"
    if is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for role in models:
            (partial / role).mkdir()
    dist.barrier()
    torch.save(torch.get_rng_state(), partial / f"rng_{dist.get_rank():04d}.pt")
    for role, model in models.items():
        with model.held("state"):
            wait_for_parameters(model.chunks)
            save_sharded(model.model, model.optimizer, partial / role)
    if is_main:
        updates = {role: model.num_updates for role, model in models.items()}
        content = {"step": step, "num_updates": updates, "run": state}
        (partial / "state.json").write_text(json.dumps(content, indent=1))
    dist.barrier()
    if is_main:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _replace_text(root / "latest", final.name)
        for old in sorted(root.glob("step_??????"))[:-keep_last]:
            shutil.rmtree(old)
    dist.barrier()


def load_latest(
    root: Path, models: Mapping[str, TrainedModel]
) -> tuple[int, dict[str, Any]] | None:
    """Load the newest checkpoint into the models.

    Returns:
        (steps done, state given to save), or None when the run has no checkpoint yet.

    Raises:
        CheckpointError: `latest` names a checkpoint that is not there or not whole, or one of other
            roles.
    """
    latest = root / "latest"
    if not latest.exists():
        return None
    directory = root / latest.read_text().strip()
    try:
        content = json.loads((directory / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{latest} names {directory.name}, which is not a whole checkpoint ({error}); "
            "write an older checkpoint's name into it, or set checkpoint.resume=false"
        ) from None
    held = content["num_updates"]
    if set(held) != set(models):
        raise CheckpointError(
            f"{directory} holds {' and '.join(held)}, but this configuration trains "
            f"{' and '.join(models)} (algorithm.stage, advantage_estimator); go on with the run's "
            "own configuration, or start another run with logging.run_dir, to which "
            "model.critic_checkpoint can hand a critic"
        )
    for role, model in models.items():
        with model.held("state"):
            load_sharded(model.model, model.optimizer, directory / role)
        model.num_updates = held[role]
    rng = directory / f"rng_{dist.get_rank():04d}.pt"
    if rng.exists():  # another number of ranks resumes with the state that the seed gave
        torch.set_rng_state(torch.load(rng, weights_only=True))
    return content["step"], content["run"]


def critic_directory(config: VapoConfig) -> Path | None:
    """Return where the weights of model.critic_checkpoint's critic lie; None: it is not set.

    For a run that resumes it is its own latest checkpoint, so that the other may be gone by then.

    Raises:
        CheckpointError: see find_critic.
    """
    if config.model.critic_checkpoint is None:
        return None
    own = Path(config.logging.run_dir)
    resumes = config.checkpoint.resume and (own / "checkpoints/latest").is_file()
    return find_critic(own if resumes else Path(config.model.critic_checkpoint))[0]


def find_critic(path: Path) -> tuple[Path, int]:
    """Find the critic of a checkpoint, or of a run directory's latest one.

    Returns:
        (its distributed checkpoint, the updates it has had).

    Raises:
        CheckpointError: there is no whole checkpoint, or no critic in it.
    """
    latest = path / "checkpoints/latest"
    directory = latest.parent / latest.read_text().strip() if latest.is_file() else path
    try:
        updates = json.loads((directory / "state.json").read_text())["num_updates"]
        held = ", ".join(updates)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"model.critic_checkpoint={path} is no whole checkpoint ({error}); set it to a run "
            "directory that has one, or to one of its checkpoints/step_*"
        ) from None
    if "critic" not in updates:
        raise CheckpointError(
            f"model.critic_checkpoint={path}: {directory.name} holds no critic, only {held}; set "
            "it to a run with algorithm.advantage_estimator=gae"
        )
    return directory / "critic", updates["critic"]


def load_critic(config: VapoConfig, critic: TrainedModel) -> None:
    """Give a new run's critic the optimizer's state and number of updates of critic_checkpoint's.

    Collective; works for any layout. The weights, from which the critic was built, come again: the
    optimizer's main parameters with them.

    Raises:
        CheckpointError: see find_critic; or the optimizer's state is of another kind.
    """
    path = Path(str(config.model.critic_checkpoint))
    directory, updates = find_critic(path)
    if not _optimizer_fits(directory, config):
        raise CheckpointError(
            f"model.critic_checkpoint={path}: the state of its optimizer does not fit this run's "
            f"parallel.use_distributed_optimizer={config.parallel.use_distributed_optimizer}, "
            f"model.dtype={config.model.dtype} and algorithm.freeze_critic_attention="
            f"{config.algorithm.freeze_critic_attention}; use the settings of the run that wrote "
            "it, or take its weights alone with model.critic_checkpoint_optimizer=false"
        )
    with critic.held("state"):
        load_sharded(critic.model, critic.optimizer, directory)
    critic.num_updates = updates


def _optimizer_fits(directory: Path, config: VapoConfig) -> bool:
    """Does a checkpoint hold the optimizer state that this configuration's optimizer asks for?

    The distributed optimizer has main parameters of every type, the other one of bfloat16 alone,
    each under a name of its own.
    """
    keys = [key for key in ShardedReader(directory).tensors if key.startswith("optimizer.state.")]
    kinds = {key.split(".")[2] for key in keys}
    is_distributed = config.parallel.use_distributed_optimizer
    has_main = config.model.dtype == "bfloat16" and not is_distributed
    learns_attention = any(".self_attention.linear_proj." in key for key in keys)
    return (
        ("param" in kinds) == is_distributed
        and ("fp32_param" in kinds) == has_main
        and learns_attention != config.algorithm.freeze_critic_attention
    )


def _replace_text(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    os.replace(beside, path)

"""Resumes a run from its newest complete checkpoint; starts a critic from another run's.

Every file is verified against its checksum before it is loaded. Loading works for any layout and
executes no code from a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from vapo_megatron.config import VapoConfig
from vapo_megatron.data.disk_errors import writing
from vapo_megatron.errors import CheckpointError, DataError, tell
from vapo_megatron.parallel.reduce import any_rank
from vapo_megatron.parallel.sharded_state import load_model_weights, load_sharded
from vapo_megatron.roles.trained import TrainedModel
from vapo_megatron.run.checkpoint import files as checkpoint_files
from vapo_megatron.run.directory import read_config


class Start(NamedTuple):
    """The checkpoint that a run starts from; roles without one start from their path in model."""

    own: Path | None = None
    """The run's own checkpoint that it resumes from."""
    critic: tuple[Path, int] | None = None
    """Only for a new run: see find_critic."""

    def path(self, role: str, config: VapoConfig) -> str | None:
        """Return where a role's initial weights are read from; None: they are loaded later.

        A checkpoint of adapters lacks the weights below them.
        """
        model = config.model
        has_adapters = model.lora.of(role)
        if self.own is not None and role in config.algorithm.trained_roles and not has_adapters:
            return None
        if role != "critic":
            return model.hf_path
        if self.critic is not None and not has_adapters:
            return None if model.critic_checkpoint_optimizer else str(self.critic[0])
        return model.critic_hf_path or model.hf_path


def find_start(config: VapoConfig) -> Start:
    """Find the checkpoint that a run resumes from, or the critic that it starts with; collective.

    A resumed run has a critic of its own, and model.critic_checkpoint may no longer exist. A run
    that starts from scratch abandons existing checkpoints.

    Raises:
        CheckpointError: see newest_complete and find_critic.
        UserError: on the main rank, which abandons them; see writing.
    """
    own, resume = Path(config.logging.run_dir, "checkpoints"), config.checkpoint.resume
    # torchrun's count may differ between nodes.
    if any_rank(checkpoint_files.resumes(resume)):
        directory = checkpoint_files.newest_complete(own)
        if directory is not None:
            if not resume and dist.get_rank() == 0:
                tell(f"restarted job: resumes from {directory} despite checkpoint.resume=false")
            state = checkpoint_files.read_state(directory)
            field = f"checkpoint {directory}"
            roles = config.algorithm.trained_roles
            checkpoint_files.check_meaning(state, config, roles, field=field)
            return Start(own=directory)
    elif dist.get_rank() == 0:
        with writing(own):
            checkpoint_files.start_from_scratch(own)
    path = config.model.critic_checkpoint
    if path is None:
        return Start()
    critic = find_critic(Path(path))
    state = checkpoint_files.read_state(critic[0].parent)
    field = f"model.critic_checkpoint={path}"
    checkpoint_files.check_meaning(state, config, ["critic"], field=field)
    return Start(critic=critic)


def load_run(directory: Path, models: Mapping[str, TrainedModel]) -> tuple[int, dict[str, Any]]:
    """Load a complete checkpoint into the models; collective.

    Returns:
        (finished steps, the state passed to save).

    Raises:
        CheckpointError: it has other roles, another model, or an optimizer with other settings.
    """
    content = checkpoint_files.read_state(directory)
    held = content["num_updates"]
    checkpoint_files.check_roles(directory, held, models)
    for role, model in models.items():
        placed = model.placed
        with placed.held("state"):
            load_sharded(placed.model, placed.optimizer, directory / role)
        model.num_updates = held[role]
    return content["step"], content["run"]


def check_base(directory: Path, before: str | None, now: str | None, hf_path: str) -> None:
    """Refuse to go on with adapters on other weights than those that they were trained on.

    Args:
        directory: the run's checkpoint.
        before, now: digests of the weights, see base_digest; None: there are no adapters, or it is
            not known.
        hf_path: model.hf_path.

    Raises:
        CheckpointError: on every rank.
    """
    if before is not None and now is not None and before != now:
        raise CheckpointError(
            f"model.hf_path={hf_path} has other weights than those that the adapters in "
            f"{directory} were trained on; set it to the base model that the run began with"
        )


def changed_settings(state: Mapping[str, Any], config: VapoConfig) -> list[str]:
    """Return "section.field: old -> new" of each field that differs from the checkpoint's.

    A checkpoint without its configuration is compared with the run directory's config.yaml, which
    the run is about to replace. Fields that an older version did not know are left out.

    Args:
        state: from load_run.
        config: today's.
    """
    before = state.get("config")
    if before is None:
        try:
            before = read_config(Path(config.logging.run_dir, "config.yaml"))
        except DataError:  # Nothing else needs it.
            before = {}
    return list(_differences(before, config.model_dump(mode="json"), ""))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> Iterator[str]:
    is_named = prefix.count(".") > 1  # In a table of the user's names, as data.sources.
    for name in dict.fromkeys([*now, *before]) if is_named else now:
        if name not in before and not is_named:
            continue
        old, new = before.get(name, "unset"), now.get(name, "unset")
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            change = " -> ".join(v if isinstance(v, str) else json.dumps(v) for v in (old, new))
            yield f"{prefix}{name}: {change}"


def find_critic(path: Path) -> tuple[Path, int]:
    """Find the critic in a checkpoint, or in a run directory's newest complete one; collective.

    Returns:
        (its distributed checkpoint, its number of updates).

    Raises:
        CheckpointError: there is no complete checkpoint, or no critic in it.
    """
    directory = checkpoint_files.newest_complete(path / "checkpoints", "critic") or path
    if directory == path and (problems := checkpoint_files.find_problems(path, "critic")):
        raise CheckpointError(
            f"model.critic_checkpoint={path} is no complete checkpoint ({problems[0]}); set it to "
            "a run directory that has one, or to one of its checkpoints/step_*"
        )
    updates = checkpoint_files.read_state(directory)["num_updates"]
    if "critic" not in updates:
        raise CheckpointError(
            f"model.critic_checkpoint={path}: {directory.name} holds no critic, only "
            f"{', '.join(updates)}; set it to a run with algorithm.advantage_estimator=gae"
        )
    return directory / "critic", updates["critic"]


def load_critic(directory: Path, updates: int, config: VapoConfig, critic: TrainedModel) -> None:
    """Load model.critic_checkpoint into a new run's critic: weights, optimizer, update count.

    Collective; `directory` and `updates` are from find_critic, the rest is the new run's.

    Raises:
        CheckpointError: the checkpoint is of another model or kind of optimizer.
    """
    field = f"model.critic_checkpoint={config.model.critic_checkpoint}"
    checkpoint_files.check_optimizer(directory, "critic", config, field=field)
    placed = critic.placed
    with placed.held("state"):
        load_sharded(placed.model, placed.optimizer, directory)
    critic.num_updates = updates


def load_critic_adapters(directory: Path, critic: TrainedModel) -> None:
    """Load the adapters and the value head of model.critic_checkpoint, without its optimizer."""
    placed = critic.placed
    with placed.held("state"):
        load_model_weights(placed.model, directory)
        placed.optimizer.reload_model_params()

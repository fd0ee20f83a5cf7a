"""Checks that a run's checkpoints and export fit on its disk."""

from __future__ import annotations

import math
from pathlib import Path

from vapo_megatron.config import CheckpointConfig, VapoConfig
from vapo_megatron.data.disk_errors import free_bytes
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning.memory import checkpoint_bytes, export_bytes
from vapo_megatron.run.checkpoint.files import (
    candidates,
    resumes,
    step_directories,
    unfinished,
)


def check_disk(config: VapoConfig, shape: ModelShape) -> list[str]:
    """Refuse a run whose next checkpoint, or export if all steps are done, does not fit.

    Unknown free space is accepted: some network file systems report a size of 0.

    Args:
        config: the run's; its layout divides the model.
        shape: the model.

    Returns:
        A warning if all the checkpoints that are kept at once will have no room; else empty.

    Raises:
        ConfigError: names the directory, what it takes, what is free, and remedies.
    """
    run_dir, settings = Path(config.logging.run_dir), config.checkpoint
    root, num_steps = run_dir / "checkpoints", config.algorithm.num_steps
    found = candidates(root) if resumes(settings.resume) else []
    is_over = bool(found) and int(found[0].name.split("_")[1]) >= num_steps
    place, what, needed = root, "a checkpoint", checkpoint_bytes(shape, config)
    # All steps are done: a resumed run only exports.
    if is_over:
        place, what, needed = run_dir / "hf_export", "the export", export_bytes(shape, config)
    free = free_bytes(place.absolute(), unfinished(root))
    if free is None:
        return []
    have = f"{_gb(free)} are free in logging.run_dir={config.logging.run_dir}"
    if free < needed:
        raise ConfigError(
            f"{what} takes {_gb(needed)}, but {have}; free {_gb(needed - free)}, or set "
            "logging.run_dir to a directory on a larger disk"
        )

    # The next checkpoint fits. Warn if those that are kept later will not.
    count = most_at_once(settings, num_steps)
    needed_in_all = (count - len(step_directories(root))) * needed
    if is_over or free >= needed_in_all:
        return []
    fields = ", ".join(f"{name}={getattr(settings, name)}" for name in ("keep_last", "keep_every"))
    return [
        f"warning: the run keeps up to {count} checkpoints of {_gb(needed)} at once "
        f"(checkpoint.{fields}, and the one being written), but {have}; free "
        f"{_gb(needed_in_all - free)}, or keep fewer"
    ]


def most_at_once(settings: CheckpointConfig, num_steps: int) -> int:
    """Return how many checkpoints a run has on its disk at the most, one being written."""
    every = settings.every_steps or max(1, num_steps)
    # The last step's is the newest of keep_last + 1. Counted, since a run may have billions.
    before_last = range(every, num_steps, every)
    older = before_last[: -settings.keep_last]
    both = math.lcm(every, settings.keep_every)
    kept = range(both, older.stop, both) if both else ()
    return len(before_last) - len(older) + 1 + len(kept)


def _gb(num_bytes: int) -> str:
    size = num_bytes / 1e9
    return f"{size:.3g} GB" if size < 999 else f"{size:,.0f} GB"

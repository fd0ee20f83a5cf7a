"""Checks before the start: paths that a configuration names. Loads no torch."""

from __future__ import annotations

import os
from pathlib import Path

from vapo_megatron.config import VapoConfig
from vapo_megatron.config.missing import missing_data, missing_model
from vapo_megatron.errors import ConfigError


def require_paths(config: VapoConfig, replay: Path | None, *, writes: bool = True) -> None:
    """Check that a run's inputs exist, and that its directory can be written to.

    Args:
        config: valid by itself.
        replay: run directory to replay; None: sample.
        writes: the run directory will be written to.

    Raises:
        ConfigError: a path is not set or does not exist, or a replay would overwrite its dump.
    """
    run_dir = config.logging.run_dir
    required: dict[str, str | Path | None] = {"model.hf_path": config.model.hf_path}
    optional = {"model.critic_hf_path": config.model.critic_hf_path}
    if replay is None:
        optional["model.reward_hf_path"] = config.model.reward_hf_path
        if not config.data.sources:
            required["data.train_path"] = config.data.train_path
        for name, source in config.data.sources.items():
            required[f"data.sources.{name}.path"] = source.path
        for name, file in config.evaluation.sources.items():
            required[f"evaluation.sources.{name}.path"] = file.path
        optional["evaluation.path"] = config.evaluation.path
    else:
        required["--replay"] = replay
        # --replay names a run directory or one of its dumps.
        dumps = [(replay / "replay").resolve(), replay.resolve()]
        written = [Path(run_dir, name).resolve() for name in ("replay", "skipped")]
        if writes and any(path in dumps for path in written):
            raise ConfigError(
                f"logging.run_dir={run_dir} is the run that is replayed, which would be written "
                "over; set logging.run_dir to another directory"
            )

    for name, path in required.items():
        if path is None:
            raise ConfigError(f"{name} is required; set {name}=PATH")
    for name, path in {**required, **optional}.items():
        if path is not None and not os.path.exists(path):
            told = missing_model if name.startswith("model.") else missing_data
            raise ConfigError(told(name, path))
    if writes:
        _require_directory(run_dir)


def _require_directory(run_dir: str) -> None:
    """Refuse a run directory that cannot be made or written to."""
    if run_dir.startswith("~"):
        raise ConfigError(
            f"logging.run_dir={run_dir}: ~ is not expanded here, and would become a directory of "
            f"that name; set logging.run_dir={os.path.expanduser(run_dir)}"
        )
    path = Path(run_dir).absolute()
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # Too long, unreadable, or with a null character.
        raise ConfigError(f"logging.run_dir={run_dir!r}: {error}; set another directory") from None
    for place in (path, path / "checkpoints", path / "rollouts"):
        # A link that leads nowhere is there, too.
        first = next(p for p in (place, *place.parents) if os.path.lexists(p))
        if not first.is_dir() or not os.access(first, os.W_OK | os.X_OK):
            wrong = "cannot be written to" if first.is_dir() else "is no directory"
            raise ConfigError(f"logging.run_dir={run_dir}: {first} {wrong}; set another directory")

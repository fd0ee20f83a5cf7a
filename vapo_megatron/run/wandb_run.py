"""A run's rows in Weights & Biases: one W&B run per run directory, which a resume continues.

RUN/wandb_run_id    id of the W&B run
RUN/wandb/          its local files; with WANDB_MODE=offline, for `wandb sync`
"""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vapo_megatron.config import LoggingConfig
from vapo_megatron.data.storage import replace_file
from vapo_megatron.errors import ConfigError, UserError

ID_FILE = "wandb_run_id"


def check_wandb(logging: LoggingConfig) -> None:
    """Raise a ConfigError if wandb is not installed, or told more than whether it is wanted.

    Does not import it.
    """
    project = logging.wandb_project
    for name in ("wandb_name", "wandb_group", "wandb_tags"):
        if project is None and (value := getattr(logging, name)):
            raise ConfigError(
                f"logging.{name}={value} needs logging.wandb_project, which is null; set it, or "
                f"leave {name} out"
            )
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"logging.wandb_project={project} needs the package wandb; pip install wandb, or "
            "unset it"
        )


class WandbRun:
    """The W&B run of a run directory."""

    def __init__(
        self, run_dir: Path, logging: LoggingConfig, config: Mapping[str, Any], *, resumes: bool
    ) -> None:
        """Continue the W&B run of a resumed run directory, or start one.

        Raises:
            UserError: W&B cannot be used: not installed, not logged in, no network.
        """
        check_wandb(logging)
        import wandb

        id_file = run_dir / ID_FILE
        if not (resumes and id_file.exists()):
            replace_file(id_file, secrets.token_hex(4) + "\n")
        try:
            self._run = wandb.init(
                project=logging.wandb_project,
                id=id_file.read_text().strip(),
                name=logging.wandb_name or run_dir.name,
                group=logging.wandb_group,
                tags=logging.wandb_tags or None,
                resume="allow",
                dir=str(run_dir),
                config=dict(config),
                # progress.py redirects standard output.
                settings=wandb.Settings(console="off"),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"logging.wandb_project={logging.wandb_project}: "
                f"{' '.join(str(error).split())}; run `wandb login`, set WANDB_MODE=offline, or "
                "unset it"
            ) from None
        # W&B's own step counter never goes back, but a resume rewrites rows after its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Mapping[str, Any]) -> None:
        """Log a row of metrics with its step, except null metrics."""
        self._run.log({name: value for name, value in row.items() if value is not None})

    def close(self, *, failed: bool) -> None:
        """Upload the rest and finish."""
        self._run.finish(exit_code=int(failed))

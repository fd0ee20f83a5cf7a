"""What does not change the training: checkpoints, time limits, logs and evaluation."""

from __future__ import annotations

from typing import Literal

from vapo_megatron.config.data import FileConfig
from vapo_megatron.config.section import Section, field


class CheckpointConfig(Section):
    """Checkpoints, resume and export."""

    every_steps: int = field(10, "Steps between checkpoints; 0: only at the end.", ge=0)
    keep_last: int = field(2, "Number of latest checkpoints to keep.", ge=1)
    keep_every: int = field(0, "Steps between checkpoints that are never deleted; 0: none.", ge=0)
    asynchronous: bool = field(
        True,
        "Copy the state to host memory and write it while training continues; false: training "
        "waits for the disk, and nothing is copied.",
    )
    resume: bool = field(
        True,
        "Resume from the run directory's latest complete checkpoint, if any; false: start from "
        "scratch; a job that torchrun or Slurm restarts still resumes.",
    )
    grace_seconds: float = field(
        30.0,
        "Time that a run has to exit after SIGTERM, SIGUSR1 or Ctrl-C: it finishes the current "
        "step if there is time, else saves the previous one.",
        ge=0,
    )
    hf_export: bool = field(True, "Export the trained actor as an HF directory at the end.")


class TimeoutsConfig(Section):
    """How long a phase may last without progress before the run is aborted with stack traces."""

    start_seconds: float = field(
        3600.0, "Startup: building vLLM and the models, loading a checkpoint.", gt=0
    )
    generation_seconds: float = field(
        7200.0, "One round of sampling, or an evaluation; set by the longest responses.", gt=0
    )
    update_seconds: float = field(900.0, "One update of the actor or the critic.", gt=0)
    checkpoint_seconds: float = field(3600.0, "Writing a checkpoint or the HF export.", gt=0)
    other_seconds: float = field(
        1800.0,
        "Any other phase: verification, exchange, values, log-probabilities, weight sync.",
        gt=0,
    )
    silence_seconds: float = field(
        120.0, "Time without a heartbeat from a process, in any phase.", gt=0
    )


class LoggingConfig(Section):
    """Output of a run."""

    run_dir: str = field("runs/vapo", "Output directory.")
    tensorboard: bool = field(True, "Write TensorBoard events.")
    wandb_project: str | None = field(
        None, "Weights & Biases project to log metrics to; null: off."
    )
    wandb_name: str | None = field(
        None, "The run's name there; null: the name of run_dir, without what is above it."
    )
    wandb_group: str | None = field(None, "Its group there, such as of several seeds.")
    wandb_tags: list[str] = field([], "Its tags there.")
    rollout_groups: int = field(2, "Groups of responses written as JSONL per step.", ge=0)
    dump_steps: int = field(
        0, "Number of latest steps whose responses are dumped for --replay; 0: none.", ge=0
    )
    progress: Literal["auto", "live", "plain", "off"] = field(
        "auto", "Progress display; auto: live on a terminal, plain lines elsewhere."
    )


class EvaluationConfig(Section):
    """Accuracy on held-out problems, with the training verifier."""

    path: str | None = field(
        None, "JSONL or parquet file of held-out problems; null, without sources: no evaluation."
    )
    sources: dict[str, FileConfig] = field(
        {}, "Several files by name, in place of path, each with the fields below."
    )
    every_steps: int = field(
        0, "Steps between evaluations; 0: only before the first and after the last step.", ge=0
    )
    samples: int = field(32, "Responses per problem (the K of avg@K).", "K", ge=1)
    temperature: float = field(1.0, "Sampling temperature; 0: greedy.", ge=0)
    top_p: float = field(0.7, "Nucleus sampling.", gt=0, le=1)
    top_k: int = field(-1, "Top-k sampling; -1: off.")

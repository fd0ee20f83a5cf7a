"""Writes a run's output files: a row of metrics per step, problems, responses.

Rows are numbered 1..N, one per training step; row 0 holds the evaluation before training, and an
evaluation after step s is in row s. A metric missing from a row was not measured in that step (the
actor's in value pretraining); null means measured, but not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.config import LoggingConfig
from vapo_megatron.config.metrics import describe
from vapo_megatron.config.phases import Span
from vapo_megatron.data.disk_errors import writing
from vapo_megatron.data.storage import append, replace_file, to_line
from vapo_megatron.run.directory import (
    HELD_OUT_FILE,
    METRICS_FILE,
    PROBLEMS_FILE,
    TIMELINE_FILE,
    read_config,
    read_rows,
    rollout_file,
    rollout_steps,
)
from vapo_megatron.run.wandb_run import WandbRun


class MetricsWriter:
    """Writes a run's output files, TensorBoard events and W&B rows; on the main rank."""

    def __init__(
        self,
        run_dir: str | Path,
        tensorboard: bool = True,
        resume_step: int = 0,
        is_unevaluated: bool = False,
        logging: LoggingConfig | None = None,
    ):
        """Open the run's files and drop everything of steps >= resume_step from them.

        Args:
            run_dir: created if missing.
            tensorboard: also write events, to run_dir/tensorboard.
            resume_step: first step that will be written; 0 for a run from scratch.
            is_unevaluated: the last step's evaluation was interrupted; rewrite its row.
            logging: its wandb_project gets the rows too; None: no project.

        Raises:
            DataError: a line of a file is invalid.
            UserError: here and below, a file cannot be written; see disk_errors.writing.
        """
        self.run_dir = Path(run_dir)
        self._events_dir = self.run_dir / "tensorboard"
        first_row = resume_step - is_unevaluated
        self._last_step = first_row - 1
        firsts = {
            METRICS_FILE: first_row, HELD_OUT_FILE: first_row, TIMELINE_FILE: first_row,
            PROBLEMS_FILE: resume_step,
        }  # fmt: skip
        with writing(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            for name, first in firsts.items():
                file = self.run_dir / name
                if file.exists():
                    kept = [row for row in read_rows(file) if row["step"] < first]
                    replace_file(file, "".join(map(to_line, kept)))
            for step in rollout_steps(self.run_dir):
                if step >= resume_step:
                    rollout_file(self.run_dir, step).unlink()
            self._file = (self.run_dir / METRICS_FILE).open("ab")
            self._events = None
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._events = SummaryWriter(str(self._events_dir), purge_step=first_row)
        self._wandb = None
        if logging is not None and logging.wandb_project is not None:
            config = read_config(self.run_dir / "config.yaml")
            self._wandb = WandbRun(self.run_dir, logging, config, resumes=resume_step > 0)

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Write one step's row and return it.

        Args:
            step: greater than the previous row's.
            metrics: registered numbers or 0-d tensors; non-finite ones become null.
        """
        assert step > self._last_step, f"row {step} after row {self._last_step}"
        unknown = [name for name in metrics if describe(name) is None]
        assert not unknown, f"unknown metrics {unknown}: add them to config/metrics.py"
        row: dict[str, Any] = {"step": step}
        row |= {name: _finite(value) for name, value in metrics.items()}
        with writing(self.run_dir / METRICS_FILE):
            append(self._file, [row])
        self._last_step = step
        if self._events:
            with writing(self._events_dir):
                for name, value in row.items():
                    if name != "step" and value is not None:
                        self._events.add_scalar(name, value, step)
                self._events.flush()
        if self._wandb:
            self._wandb.write(row)
        return row

    def write_problems(
        self,
        step: int,
        problems: Sequence[int],
        correct: Sequence[int],
        sizes: Sequence[int],
        *,
        held_out: bool = False,
    ) -> None:
        """Write a step's problems (`Prompt.index`) and how many responses to each were correct.

        Args:
            step: of the row.
            problems, correct, sizes: one number per group; its size is that of its responses.
            held_out: the problems are an evaluation's.
        """
        # One number where all groups have it, as in almost every run.
        size = sizes[0] if len(set(sizes)) == 1 else list(sizes)
        row = {"step": step, "group_size": size, "problems": list(problems)}
        path = self.run_dir / (HELD_OUT_FILE if held_out else PROBLEMS_FILE)
        with writing(path), path.open("ab") as file:
            append(file, [row | {"correct": list(correct)}])

    def write_timeline(self, step: int, spans: Mapping[str, Sequence[Span]]) -> None:
        """Write when each side was in which phase, up to the step's row since the one before."""
        path = self.run_dir / TIMELINE_FILE
        with writing(path), path.open("ab") as file:
            append(file, [{"step": step, **spans}])

    def write_rollouts(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Write the step's records of token_records.py to rollouts/step_*.jsonl; none: no file."""
        if not groups:
            return
        file = rollout_file(self.run_dir, step)
        with writing(file):
            file.parent.mkdir(exist_ok=True)
        replace_file(file, "".join(map(to_line, groups)))

    def close(self, *, failed: bool = False) -> None:
        """Flush and close; may be called twice."""
        with writing(self.run_dir / METRICS_FILE):  # close() retries a write that failed
            self._file.close()
        if self._events:
            with writing(self._events_dir):
                self._events.close()
        if self._wandb:
            self._wandb.close(failed=failed)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(failed=error is not None)


def _finite(value: Any) -> float | int | None:
    if isinstance(value, bool | int):
        return int(value)
    value = float(value)
    return value if math.isfinite(value) else None

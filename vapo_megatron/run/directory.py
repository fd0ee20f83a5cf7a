"""Reads the files of a run directory that the report is made from.

config.yaml (resolved), metrics.jsonl (one row per step), problems.jsonl (one row per step: its
problems and how many responses to each were correct), held_out.jsonl (the same for evaluations),
timeline.jsonl (one row per step: phases of the main trainer and the first rollout worker),
rollouts/step_*.jsonl (one group of responses per line). Files are replaced atomically or appended
to by whole lines, so they can be read during the run.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import yaml

from vapo_megatron.errors import DataError
from vapo_megatron.run.contents import (
    LARGEST,
    Group,
    ProblemsRow,
    TimelineRow,
    check_config,
    check_line,
    check_metrics,
)

METRICS_FILE, PROBLEMS_FILE, HELD_OUT_FILE = "metrics.jsonl", "problems.jsonl", "held_out.jsonl"
TIMELINE_FILE = "timeline.jsonl"
"""Files of one row per step."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Contents of a run directory, finished or not."""

    run_dir: Path
    config: dict[str, Any]
    """config.yaml as sections of fields; empty when there is none."""
    rows: list[dict[str, Any]]
    """Rows of metrics.jsonl, in order."""
    rollout_steps: list[int]
    """Steps with some responses on file."""

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of config.yaml; empty if it is missing."""
        return self.config.get(name) or {}

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Return a step's groups on file; see token_records.py."""
        file = rollout_file(self.run_dir, step)
        return _checked(file, _read_lines(file), Group)

    def timeline(self) -> list[dict[str, Any]]:
        """Return each step's spans by side: lists of phase, step, begin and end."""
        file = self.run_dir / TIMELINE_FILE
        return _checked(file, _rows_of(file), TimelineRow)

    def problems(self, *, held_out: bool = False) -> list[dict[str, Any]]:
        """Return each step's (or evaluation's) problems and their counts of correct responses."""
        file = self.run_dir / (HELD_OUT_FILE if held_out else PROBLEMS_FILE)
        return _checked(file, _rows_of(file), ProblemsRow)


def read_run(run_dir: str | Path) -> Run:
    """Read a run directory, finished or not.

    Raises:
        DataError: it is not a run directory, or a file in it cannot be read or holds other types;
            here, and by the methods of the result.
    """
    run_dir = Path(run_dir)
    config_file, metrics_file = run_dir / "config.yaml", run_dir / METRICS_FILE
    if not (config_file.exists() or metrics_file.exists()):
        raise DataError(
            f"{run_dir} is not a run directory: it has neither config.yaml nor metrics.jsonl; "
            "give the directory that logging.run_dir named"
        )
    rows = _rows_of(metrics_file)
    for number, row in enumerate(rows, 1):
        check_metrics(row, f"{metrics_file} line {number}")
    return Run(run_dir, read_config(config_file), rows, rollout_steps(run_dir))


def _checked(file: Path, lines: list[dict[str, Any]], kind: Any) -> list[dict[str, Any]]:
    """Return the lines, which are of this kind; DataError: one is not."""
    for number, line in enumerate(lines, 1):
        check_line(line, kind, f"{file} line {number}")
    return lines


def _rows_of(file: Path) -> list[dict[str, Any]]:
    return read_rows(file) if file.exists() else []


def read_config(file: Path) -> dict[str, Any]:
    """Return config.yaml as sections of fields; empty if there is none.

    Raises:
        DataError: it cannot be read, or a field has another type.
    """
    if not file.exists():
        return {}
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(
            f"{file} cannot be read: {' '.join(str(error).split())}; restore it"
        ) from None
    if not isinstance(config, dict):
        raise DataError(f"{file} must hold sections, found {type(config).__name__}; restore it")
    check_config(file, config)
    return config


def rollout_file(run_dir: Path, step: int) -> Path:
    """Return the path of a step's responses."""
    return run_dir / "rollouts" / f"step_{step:06d}.jsonl"


def rollout_steps(run_dir: Path) -> list[int]:
    """Return the steps with some responses on file, in order."""
    names = (file.name for file in (run_dir / "rollouts").glob("step_*.jsonl"))
    matches = (re.fullmatch(r"step_(\d+)\.jsonl", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of one row per step; DataError names an invalid line."""
    rows = _read_lines(file)
    for number, row in enumerate(rows, 1):
        step = row.get("step")
        if type(step) is not int or not 0 <= step < LARGEST:
            raise DataError(f'{file} line {number} has no whole number "step"; remove the line')
    return rows


def _read_lines(file: Path) -> list[dict[str, Any]]:
    """Objects of a JSONL file; skips a last line that a killed run left incomplete."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
    objects = []
    # After the last newline is nothing or an incomplete line.
    for number, line in enumerate(lines[:-1], 1):
        try:
            found = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", str(error))
            raise DataError(
                f"{file} line {number} is not JSON ({reason}); remove the line"
            ) from None
        if not isinstance(found, dict):
            raise DataError(f"{file} line {number} is not a JSON object; remove the line")
        objects.append(found)
    return objects

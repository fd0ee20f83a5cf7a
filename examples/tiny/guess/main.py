"""A game of GEM through the adapter: VAPO, DAPO and GRPO on guess the number.

    bash examples/run_guess_tiny.sh [--seeds 0 1 2 3 4] [--quick]

Every seed has a base model and a pretrained critic of its own, which its arms share. Ends with
table.md: held-out return by step. If interrupted, the same command resumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import episodes
from ablation.arms import VAPO
from runner import tables
from runner.arms import task_table, titles
from runner.jobs import Job, metrics, results

READ = 512
"""Responses of value pretraining."""
RETURN = "evaluation/reward_mean"
ARMS = {"vapo": VAPO, **episodes.not_pretrained({"dapo": "DAPO", "grpo": "GRPO"}, READ)}
TABLE = task_table(
    "guess", "guess/game.py", ("guess_tiny.yaml",), ARMS, read=READ, updates=5, base_seconds=100.0
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs and write the table; return 1 if a job failed."""
    return episodes.main("guess", __doc__, arguments, TABLE, markdown)


def markdown(jobs: Sequence[Job]) -> str:
    """Return the table of what is finished; empty: nothing is."""
    runs = results(jobs, ARMS, metrics)
    if not runs:
        return ""
    text = tables.of_finished("arm", titles(ARMS), tables.by_step(runs, returns), runs)
    return f"{text}\nHalving what is left always wins, with a return of 1.\n"


def returns(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the steps and the held-out mean returns of metrics.jsonl's rows that have one."""
    return [(row["step"], row[RETURN]) for row in rows if RETURN in row]

"""Where a value model pays over turns: VAPO, PPO, DAPO and GRPO on turns with luck.

    bash examples/run_turns_tiny.sh [--seeds 0 1 2 3 4] [--quick]

Every seed has a base model and a pretrained critic of its own, which its arms share. Ends with
table.md: held-out accuracy by step, how well advantages credit the choices, and what the critic
explains by turn. If interrupted, the same command resumes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import episodes
from ablation.arms import VAPO
from runner import tables
from runner.arms import Arm, task_table, titles
from runner.jobs import Job, metrics, results
from runner.tables import Cell, Runs, accuracies

from turns import luck
from vapo_megatron.run.directory import read_rows

READ = 1024
"""Responses of value pretraining."""
ARMS = {
    "vapo": VAPO,
    "lambda_1": Arm("with lambda 1", changes=("algorithm.lambda_actor=1.0",)),
    "token": Arm("with GAE over tokens", changes=(episodes.IN_TOKENS,)),
    **episodes.not_pretrained(
        {"ppo": "vanilla PPO", "dapo": "DAPO without dynamic sampling", "grpo": "GRPO"},
        READ,
        # What dynamic sampling throws away would be more tokens than the others' sample.
        "algorithm.dynamic_sampling=false",
    ),
}
TABLE = task_table(
    "luck", "turns/luck.py", ("turns_tiny.yaml",), ARMS, read=READ, updates=5, base_seconds=100.0,
    trainer=("turns/train.py", "turns/luck.py"),
)  # fmt: skip
TURNS = (1, 4, 8, 12, 16)
Result = Mapping[str, Any]
"""metrics and credit: rows of the files of a run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs and write the table; return 1 if a job failed."""
    return episodes.main("turns", __doc__, arguments, TABLE, markdown)


def markdown(jobs: Sequence[Job]) -> str:
    """Return the tables of what is finished; empty: nothing is."""
    runs = results(jobs, ARMS, _result)
    if not runs:
        return ""
    best = luck.chance_of_goal(luck.GOOD)[luck.TURNS][0]
    return (
        f"{tables.of_finished('arm', titles(ARMS), columns(runs), runs)}\n"
        f"The best possible accuracy is {best:.3f}.\n\n"
        + tables.of_finished("explained variance by turn", titles(ARMS), by_turn(), runs)
    )


def _result(job: Job) -> Result:
    return {"metrics": metrics(job), "credit": read_rows(job.out / luck.FILE)}


def columns(runs: Runs) -> dict[str, Cell]:
    """Return the columns of accuracies and of credit."""
    return {
        **tables.by_step(runs, lambda result: accuracies(result["metrics"])),
        "good choices": tables.mean(lambda result: result["credit"][-1]["good_choices"]),
        "correlation": tables.mean(
            lambda r: _mean(row["correlation"] for row in r["credit"][:10]), ".2f"
        ),
    }


def by_turn() -> dict[str, Cell]:
    """Return the columns of what the critic, and exact values, explain of the rewards."""

    def at(name: str, turn: int) -> tables.Measure:
        return lambda r: _mean(row[name] and row[name][turn - 1] for row in r["credit"][-10:])

    found = {f"turn {turn}": tables.mean(at("explained", turn), ".2f") for turn in TURNS}
    return found | {
        f"exact, {turn}": tables.mean(at("best_explained", turn), ".2f") for turn in TURNS
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None

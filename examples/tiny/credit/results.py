"""What the runs on locks and keys show, as numbers: by step, by sampled responses, and credit."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.arms import Arm, titles
from runner.curves import Curve, at, reached
from runner.tables import Cell, Runs, accuracies, compared, each, mean, measured, of_arms

from credit import keys, measures
from vapo_megatron.run.directory import read_config, read_rows, read_run

STEPS = (10, 20, 30)
"""Policy steps after which held-out accuracy is compared."""
BUDGETS = (1000, 2000, 3000, 4000)
"""Numbers of sampled responses at which it is compared."""
LEVEL = 0.8
LOCKS = ((5, 9), (10, 14), (15, 20))
"""Numbers of locks that are compared."""
CREDIT = {
    "key_correlation": "correlation with true advantages, keys",
    "noise_ratio": "size of advantages, filler / keys",
    "value_error": "error of V",
    "good_keys": "good keys",
    "copied": "steps copied right",
    "critic/explained_variance": "explained variance",
    "best_explained_variance": "of exact values",
}
"""Fields of measures.Credit (and one of metrics.jsonl), and what the table calls them."""
PARTS = ((1, 5), (6, 15), (16, 30))
"""Steps over which they are averaged."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run."""

    by_step: Curve
    """(policy steps, held-out accuracy)"""
    by_responses: Curve
    """(responses sampled, held-out accuracy); value pretraining and dropped groups count."""
    rows: list[dict[str, Any]]
    """Of metrics.jsonl."""
    credit: list[dict[str, Any]]
    """Of credit.jsonl."""
    by_locks: Curve = ()
    """(locks, accuracy) of each held-out problem in the last evaluation"""

    def of_field(self, name: str) -> Curve:
        """Return a field of credit.jsonl, or of metrics.jsonl, by step, where it is defined."""
        rows = self.rows if "/" in name else self.credit
        return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def read_result(run: Path, value: Path | None) -> Result:
    """Read a run and count its responses.

    Args:
        run: run directory.
        value: that of its value pretraining; None: it has had none.
    """
    rows = read_rows(run / "metrics.jsonl")
    by_step = accuracies(rows)
    before = responses(value)[-1][1] if value else 0.0
    sampled = dict(responses(run))
    return Result(
        by_step,
        [(before + sampled[step], accuracy) for step, accuracy in by_step],
        rows,
        read_rows(run / measures.FILE),
        _by_locks(run),
    )


def _by_locks(run: Path) -> Curve:
    """Read Result.by_locks."""
    found = read_run(run)
    evaluated = found.problems(held_out=True)
    if not evaluated:
        return []
    path = Path(found.section("evaluation")["path"])
    prompts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    last = evaluated[-1]
    return [
        (len(keys.read_problem(prompts[problem]).kinds), correct / last["group_size"])
        for problem, correct in zip(last["problems"], last["correct"], strict=True)
    ]


def responses(run: Path) -> list[tuple[float, float]]:
    """Return the responses sampled up to each step of a run, dropped groups included."""
    algorithm = read_config(run / "config.yaml")["algorithm"]
    total, counts = 0.0, []
    for row in read_rows(run / "metrics.jsonl"):
        if row["step"]:
            groups = row.get("rollout/groups_sampled")
            whole = algorithm["responses_per_step"]
            total += whole if groups is None else groups * algorithm["group_size"]
        counts.append((row["step"], total))
    return counts


def mean_over(result: Result, name: str, first: float, last: float) -> float | None:
    """Return the mean of a field of CREDIT over some steps; None: it has no value there."""
    known = [value for step, value in result.of_field(name) if first <= step <= last]
    return statistics.fmean(known) if known else None


def steps_to_half(result: Result, kinds: Sequence[int]) -> float | None:
    """Return the mean over kinds of the steps after which good keys are chosen half of the time."""
    chances = result.of_field("chances")
    found = [reached([(step, of_kinds[kind]) for step, of_kinds in chances], 0.5) for kind in kinds]
    known = [step for step in found if step is not None]
    return statistics.fmean(known) if len(known) == len(found) else None


def last(result: Result) -> float:
    """Return the last held-out accuracy."""
    return result.by_step[-1][1]


def accuracy_of_locks(result: Result, counts: tuple[int, int]) -> float | None:
    """Return the last held-out accuracy on problems with so many locks, the least and the most."""
    found = [y for locks, y in result.by_locks if counts[0] <= locks <= counts[1]]
    return statistics.fmean(found) if found else None


def _to_level(runs: Runs, name: str) -> str:
    """Return a cell: responses until LEVEL is reached, and in how many seeds it never is."""

    def responses_to_level(result: Result) -> float | None:
        return reached(result.by_responses, LEVEL)

    missing = len(runs.get(name, {})) - len(measured(runs, name, responses_to_level))
    text = mean(responses_to_level, ".0f")(runs, name)
    return text + (f", never in {missing}" if missing else "")


def _in_parts(field: str) -> Cell:
    """Return a column of a field of CREDIT, a mean for each of PARTS."""

    def cell(runs: Runs, name: str) -> str:
        found = [
            measured(runs, name, lambda result, p=part: mean_over(result, field, *p)).values()
            for part in PARTS
        ]
        means = [f"{statistics.fmean(values):.2f}" if values else "-" for values in found]
        return " ".join(means) if set(means) != {"-"} else "-"

    return cell


def _for_each(measure: Any, title: str, values: Sequence[Any]) -> dict[str, Cell]:
    """Return columns of `compared`, a measure's number at each of some values."""
    return {title.format(v): compared(lambda run, v=v: measure(run, v)) for v in values}


def tables(arms: Mapping[str, Arm], runs: Runs, form: keys.Form) -> dict[str, str]:
    """Return a form's tables by their headings; arms: by name, in the order of the rows."""
    columns: dict[str, dict[str, Cell]] = {
        "Held-out accuracy by step": {
            **_for_each(lambda run, step: at(run.by_step, step), "after {} steps", STEPS),
            "each seed": each(last),
            "paper": lambda _, name: arms[name].paper,
        },
        "Held-out accuracy by sampled responses": {
            **_for_each(lambda run, count: at(run.by_responses, count), "at {:,}", BUDGETS),
            f"responses to {LEVEL}": _to_level,
            "sampled in all": mean(lambda run: run.by_responses[-1][0], ".0f"),
        },
        "Credit": {title: _in_parts(field) for field, title in CREDIT.items()},
    }
    if form.min_locks < form.max_locks:
        by_locks = _for_each(accuracy_of_locks, "{0[0]} to {0[1]} locks", LOCKS)
        columns["Held-out accuracy by number of locks"] = by_locks
    if rare := form.rare_kinds:
        columns["Good keys that are rare at first"] = {
            "steps to half": compared(lambda run: steps_to_half(run, rare), ".1f"),
            "each seed": each(lambda run: steps_to_half(run, rare), ".1f"),
        }
    found = {heading: of_arms("arm", titles(arms), of, runs) for heading, of in columns.items()}
    found["Credit"] += f"\nMeans over the steps {', '.join(f'{a} to {b}' for a, b in PARTS)}.\n"
    return found

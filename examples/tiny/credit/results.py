"""What the runs on locks and keys show, as numbers: by step, by sampled responses, and credit."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.arms import Arm
from runner.curves import Curve, at, reached
from runner.tables import against, markdown, measured, spread

from credit import keys, measures
from vapo_megatron.config.metrics import accuracy_name
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
FIRST = "vapo"
"""The arm that others are compared with."""

Runs = Mapping[str, Mapping[int, "Result"]]
"""By arm and seed."""
Measure = Callable[["Result"], "float | None"]


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


def read_result(run: Path, value: Path | None) -> Result:
    """Read a run and count its responses.

    Args:
        run: run directory.
        value: that of its value pretraining; None: it has had none.
    """
    rows = read_rows(run / "metrics.jsonl")
    sampled = float(responses(value)[-1] if value else 0)
    found = [
        (row["step"], sampled + count, row[name])
        for row, count in zip(rows, responses(run), strict=True)
        if (name := accuracy_name(row))
    ]
    return Result(
        by_step=[(step, accuracy) for step, _, accuracy in found],
        by_responses=[(count, accuracy) for _, count, accuracy in found],
        rows=rows,
        credit=read_rows(run / measures.FILE),
        by_locks=_by_locks(run),
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


def responses(run: Path) -> list[float]:
    """Return the responses sampled up to each row of a run, dropped groups included."""
    algorithm = read_config(run / "config.yaml")["algorithm"]
    total, counts = 0.0, []
    for row in read_rows(run / "metrics.jsonl"):
        if row["step"]:
            groups = row.get("rollout/groups_sampled")
            whole = algorithm["responses_per_step"]
            total += whole if groups is None else groups * algorithm["group_size"]
        counts.append(total)
    return counts


def _cell(runs: Runs, name: str, measure: Measure, form: str = ".3f") -> str:
    """Mean, deviation and, unless it is the first arm, in how many seeds it is below that."""
    own, first = (measured(runs.get(n, {}), measure) for n in (name, FIRST))
    text = spread(list(own.values()), form)
    told = "-" if name == FIRST else against(own, first, form)
    return text if told == "-" else f"{text} ({told})"


def _each(runs: Runs, name: str, measure: Measure, form: str) -> str:
    return " ".join(f"{v:{form}}" for v in measured(runs.get(name, {}), measure).values())


def by_step(arms: Mapping[str, Arm], runs: Runs) -> str:
    """Return the table of held-out accuracies by step."""
    rows = [
        [
            arm.title,
            *(_cell(runs, name, lambda r, s=step: at(r.by_step, s)) for step in STEPS),
            _each(runs, name, lambda r: r.by_step[-1][1], ".3f"),
            arm.paper,
        ]
        for name, arm in arms.items()
    ]
    after = (f"after {step} steps" for step in STEPS)
    return markdown(["arm", *after, "each seed", "paper"], rows)


def by_responses(arms: Mapping[str, Arm], runs: Runs) -> str:
    """Return the table of held-out accuracies by sampled responses."""
    rows = []
    for name, arm in arms.items():
        cells = [_cell(runs, name, lambda r, b=b: at(r.by_responses, b)) for b in BUDGETS]
        of_seeds = runs.get(name, {})
        found = measured(of_seeds, lambda r: reached(r.by_responses, LEVEL))
        missing = len(of_seeds) - len(found)
        to_level = spread(list(found.values()), ".0f")
        to_level += f", never in {missing}" if missing else ""
        whole = measured(of_seeds, lambda r: r.by_responses[-1][0])
        rows.append([arm.title, *cells, to_level, spread(list(whole.values()), ".0f")])
    names = ["arm", *(f"at {b:,}" for b in BUDGETS), f"responses to {LEVEL}", "sampled in all"]
    return markdown(names, rows)


def mean_over(result: Result, name: str, first: int, last: int) -> float | None:
    """Return the mean of a field of CREDIT over some steps; None: it has no value there."""
    rows = result.rows if "/" in name else result.credit
    found = [row.get(name) for row in rows if first <= row["step"] <= last]
    known = [value for value in found if value is not None]
    return statistics.fmean(known) if known else None


def of_credit(arms: Mapping[str, Arm], runs: Runs) -> str:
    """Return the table of credit, three means a cell."""
    rows = []
    for name, arm in arms.items():
        cells = []
        for field in CREDIT:
            means = []
            for first, last in PARTS:
                found = measured(
                    runs.get(name, {}), lambda r, n=field, a=first, b=last: mean_over(r, n, a, b)
                )
                means.append(f"{statistics.fmean(found.values()):.2f}" if found else "-")
            cells.append(" ".join(means) if set(means) != {"-"} else "-")
        rows.append([arm.title, *cells])
    parts = ", ".join(f"{a} to {b}" for a, b in PARTS)
    return markdown(["arm", *CREDIT.values()], rows) + f"\nMeans over the steps {parts}.\n"


def of_rare_keys(arms: Mapping[str, Arm], runs: Runs, kinds: Sequence[int]) -> str:
    """Return the table of the steps after which rare good keys are chosen half of the time.

    Args:
        arms, runs: see by_step.
        kinds: whose good key is rare at first; the mean over them is compared.
    """

    def steps(result: Result) -> float | None:
        found = [
            reached([(row["step"], row["chances"][kind]) for row in result.credit], 0.5)
            for kind in kinds
        ]
        known = [step for step in found if step is not None]
        return statistics.fmean(known) if len(known) == len(found) else None

    rows = [
        [arm.title, _cell(runs, name, steps, ".1f"), _each(runs, name, steps, ".1f")]
        for name, arm in arms.items()
    ]
    return markdown(["arm", "steps to half", "each seed"], rows)


def of_lengths(arms: Mapping[str, Arm], runs: Runs) -> str:
    """Return the table of the last held-out accuracies by number of locks."""

    def accuracy(result: Result, first: int, last: int) -> float | None:
        found = [y for locks, y in result.by_locks if first <= locks <= last]
        return statistics.fmean(found) if found else None

    rows = [
        [arm.title, *(_cell(runs, name, lambda r, p=part: accuracy(r, *p)) for part in LOCKS)]
        for name, arm in arms.items()
    ]
    return markdown(["arm", *(f"{a} to {b} locks" for a, b in LOCKS)], rows)

"""What the runs on locks and keys show, as numbers: by step, by sampled responses, and credit."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keys
import keys_credit
from ablation_arms import Arm
from ablation_table import spread

from vapo_megatron.config.metrics import accuracy_name
from vapo_megatron.run.directory import read_config, read_rows, read_run

STEPS = (10, 20, 30)
"""Policy steps after which held-out accuracy is compared."""
BUDGETS = (1000, 2000, 3000, 4000)
"""Numbers of sampled responses at which it is compared."""
LEVEL = 0.8
FIRST = "vapo"
"""The arm that others are compared with."""

Curve = list[tuple[float, float]]
"""Points, by x."""
Runs = Mapping[str, Mapping[int, "Result"]]
"""By arm and seed."""


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
    by_locks: Curve = dataclasses.field(default_factory=list)
    """(locks, accuracy) of each held-out problem in the last evaluation"""


def read_result(run: Path, value: Path | None) -> Result:
    """Read a run and count its responses.

    Args:
        run: run directory.
        value: that of its value pretraining; None: it has had none.
    """
    rows = read_rows(run / "metrics.jsonl")
    sampled = float(responses(value)[-1] if value else 0)
    counts = [sampled + count for count in responses(run)]
    found = [
        (row["step"], count, row[name])
        for row, count in zip(rows, counts, strict=True)
        if (name := accuracy_name(row))
    ]
    return Result(
        by_step=[(step, accuracy) for step, _, accuracy in found],
        by_responses=[(count, accuracy) for _, count, accuracy in found],
        rows=rows,
        credit=read_rows(run / keys_credit.FILE),
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


def at(curve: Curve, x: float) -> float | None:
    """Interpolate a curve linearly; None: x lies outside."""
    for (x0, y0), (x1, y1) in zip(curve, curve[1:]):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return None


def reached(curve: Curve, level: float) -> float | None:
    """Return where a curve first reaches a level, interpolated; None: nowhere."""
    before: tuple[float, float] | None = None
    for x, y in curve:
        if y >= level:
            if before is None or before[1] == y:
                return x
            return before[0] + (x - before[0]) * (level - before[1]) / (y - before[1])
        before = (x, y)
    return None


def less_first(runs: Runs, name: str, measure: Callable[[Result], float | None]) -> list[float]:
    """Return an arm's measure less the first arm's, seed by seed, where both have one."""
    found = []
    for seed, result in sorted(runs.get(name, {}).items()):
        first = runs.get(FIRST, {}).get(seed)
        if first is not None:
            own, its = measure(result), measure(first)
            if own is not None and its is not None:
                found.append(own - its)
    return found


def _measured(runs: Runs, name: str, measure: Callable[[Result], float | None]) -> list[float]:
    found = (measure(result) for _, result in sorted(runs.get(name, {}).items()))
    return [value for value in found if value is not None]


def _cell(runs: Runs, name: str, measure: Callable[[Result], float | None], form: str) -> str:
    """Mean, deviation and, unless it is the first arm, in how many seeds it is below that."""
    values = _measured(runs, name, measure)
    differences = [] if name == FIRST else less_first(runs, name, measure)
    text = spread(values, form)
    if differences:
        below = sum(d < 0 for d in differences)
        text += f" ({spread(differences, '+' + form)}, below in {below} of {len(differences)})"
    return text


def by_step(arms: Mapping[str, Arm], runs: Runs) -> str:
    """Return the table of held-out accuracies by step."""
    names = ["arm", *(f"after {step} steps" for step in STEPS), "each seed", "paper"]
    rows = []
    for name, arm in arms.items():
        cells = [_cell(runs, name, lambda r, s=step: at(r.by_step, s), ".3f") for step in STEPS]
        last = _measured(runs, name, lambda r: r.by_step[-1][1])
        rows.append([arm.title, *cells, " ".join(f"{v:.3f}" for v in last), arm.paper])
    return markdown(names, rows)


def by_responses(arms: Mapping[str, Arm], runs: Runs) -> str:
    """Return the table of held-out accuracies by sampled responses."""
    names = ["arm", *(f"at {b:,}" for b in BUDGETS), f"responses to {LEVEL}", "sampled in all"]
    rows = []
    for name, arm in arms.items():
        cells = [_cell(runs, name, lambda r, b=b: at(r.by_responses, b), ".3f") for b in BUDGETS]
        found = {seed: reached(r.by_responses, LEVEL) for seed, r in runs.get(name, {}).items()}
        to_level = spread([v for v in found.values() if v is not None], ".0f")
        missing = sum(v is None for v in found.values())
        to_level += f", never in {missing}" if missing else ""
        whole = spread(_measured(runs, name, lambda r: r.by_responses[-1][0]), ".0f")
        rows.append([arm.title, *cells, to_level, whole])
    return markdown(names, rows)


CREDIT = {
    "key_correlation": "correlation with true advantages, keys",
    "noise_ratio": "size of advantages, filler / keys",
    "value_error": "error of V",
    "good_keys": "good keys",
    "copied": "steps copied right",
}
"""Fields of keys_credit.Credit, and what the table calls them."""
PARTS = ((1, 5), (6, 15), (16, 30))
"""Steps over which they are averaged."""


def mean_over(result: Result, name: str, first: int, last: int) -> float | None:
    """Return the mean of a field of credit.jsonl over some steps; None: it has no value there."""
    found = [row[name] for row in result.credit if first <= row["step"] <= last]
    known = [value for value in found if value is not None]
    return statistics.fmean(known) if known else None


def explained(result: Result, first: int, last: int) -> float | None:
    """Return the mean explained variance of a run's critic over some steps."""
    rows = [row for row in result.rows if first <= row["step"] <= last]
    known = [v for row in rows if (v := row.get("critic/explained_variance")) is not None]
    return statistics.fmean(known) if known else None


def of_credit(arms: Mapping[str, Arm], runs: Runs) -> str:
    """Return the table of credit, three means a cell."""
    names = ["arm", *CREDIT.values(), "explained variance", "of exact values"]
    rows = []
    for name, arm in arms.items():
        cells = []
        for field in (*CREDIT, None, "best_explained_variance"):
            means = []
            for first, last in PARTS:
                found = _measured(
                    runs, name,
                    lambda r, n=field, a=first, b=last: (
                        mean_over(r, n, a, b) if n else explained(r, a, b)
                    ),
                )  # fmt: skip
                means.append(f"{statistics.fmean(found):.2f}" if found else "-")
            cells.append(" ".join(means) if set(means) != {"-"} else "-")
        rows.append([arm.title, *cells])
    parts = ", ".join(f"{a} to {b}" for a, b in PARTS)
    return markdown(names, rows) + f"\nMeans over the steps {parts}.\n"


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
        [
            arm.title, _cell(runs, name, steps, ".1f"),
            " ".join(f"{v:.1f}" for v in _measured(runs, name, steps)),
        ]
        for name, arm in arms.items()
    ]  # fmt: skip
    return markdown(["arm", "steps to half", "each seed"], rows)


LOCKS = ((5, 9), (10, 14), (15, 20))
"""Numbers of locks that are compared."""


def of_lengths(arms: Mapping[str, Arm], runs: Runs) -> str:
    """Return the table of the last held-out accuracies by number of locks."""

    def accuracy(result: Result, first: int, last: int) -> float | None:
        found = [y for locks, y in result.by_locks if first <= locks <= last]
        return statistics.fmean(found) if found else None

    rows = [
        [arm.title]
        + [_cell(runs, name, lambda r, a=a, b=b: accuracy(r, a, b), ".3f") for a, b in LOCKS]
        for name, arm in arms.items()
    ]
    return markdown(["arm", *(f"{a} to {b} locks" for a, b in LOCKS)], rows)


def markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"

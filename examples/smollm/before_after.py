"""Held-out accuracy before and after a run, task by task: `before_after.py RUN`.

Each mean has its 95 % bootstrap interval over problems. Prints a table and writes it to
RUN/before_after.md; `apart` says whether the two intervals have no value in common, `one answer`
what always giving the most frequent ground truth would reach. RUN/tasks.svg has each task's curves.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The miniatures' charts.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tiny"))

from runner import curves

from vapo_megatron.config.metrics import accuracy_name
from vapo_megatron.data.problems import Problem, load_problems
from vapo_megatron.data.storage import replace_file
from vapo_megatron.errors import DataError, UserError
from vapo_megatron.rollout.evaluation.statistics import Estimate, estimates
from vapo_megatron.run.directory import Run, read_run

SEED = 0
"""Of the bootstrap."""


def shares(row: Mapping[str, Any], counts: Mapping[str, int]) -> dict[str, list[float]]:
    """Return the share of correct responses to each problem, by source.

    Args:
        row: of held_out.jsonl.
        counts: each source's number of problems; the sources follow each other by name.
    """
    total = sum(counts.values())
    if sorted(row["problems"]) != list(range(total)):
        raise DataError(
            f"the evaluation has {len(row['problems'])} problems and its files have {total}; "
            "restore the files, or start the run again"
        )
    found = {index: n / row["group_size"] for index, n in zip(row["problems"], row["correct"])}
    by_source, first = {}, 0
    for name in sorted(counts):
        by_source[name] = [found[index] for index in range(first, first + counts[name])]
        first += counts[name]
    return by_source


def accuracy(values: Sequence[float]) -> Estimate:
    """Return the mean over problems and its interval."""
    return estimates([{"accuracy": value} for value in values], SEED)["accuracy"]


class Evaluated(NamedTuple):
    """The first and the last evaluation of a run, by source."""

    problems: dict[str, Sequence[Problem]]
    before: dict[str, list[float]]
    """Share of correct responses to each problem."""
    after: dict[str, list[float]]
    last_step: int


def evaluated(run: Run) -> Evaluated:
    """Read the evaluations of a run that has sources of held-out problems."""
    evaluations = run.problems(held_out=True)
    sources = run.section("evaluation").get("sources") or {}
    if len(evaluations) < 2 or not sources:
        raise DataError(
            f"{run.run_dir} has {len(evaluations)} evaluations of {len(sources)} sources; it must "
            "have two or more, of one or more sources: let the run end"
        )
    problems = {
        name: load_problems(of["path"], of["prompt_column"], of["answer_column"], section=name)
        for name, of in sources.items()
    }
    counts = {name: len(some) for name, some in problems.items()}
    before, after = (shares(row, counts) for row in (evaluations[0], evaluations[-1]))
    return Evaluated(problems, before, after, evaluations[-1]["step"])


def table(run: Run) -> str:
    """Return the table of a run whose evaluation has sources, in Markdown."""
    problems, before, after, last_step = evaluated(run)
    trained = run.section("data").get("sources") or {}
    lines = [
        f"| task | problems | one answer | before | after {last_step} steps | apart |",
        "|---|---|---|---|---|---|",
    ]
    for name in sorted(problems, key=lambda name: (name not in trained, name)):
        first, last = accuracy(before[name]), accuracy(after[name])
        note = "" if name in trained else ", not trained on"
        count, answers = len(problems[name]), collections.Counter(p.answer for p in problems[name])
        constant = max(answers.values()) / count
        cells = [f"{name}{note}", str(count), f"{constant:.3f}", shown(first), shown(last)]
        cells.append(apart(first, last))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def picture(run: Run) -> str:
    """Return an SVG of each task's accuracy over the steps, of training and held-out responses."""
    held_out = next((name for row in run.rows if (name := accuracy_name(row))), "")
    metric = held_out.removeprefix("evaluation/")
    trained = run.section("data").get("sources") or {}
    others = [name for name in run.section("evaluation")["sources"] if name not in trained]
    colors = dict(zip([*trained, *others], itertools.cycle(curves.COLORS), strict=False))
    last = max(row["step"] for row in run.rows)
    ticks = [(step, str(step)) for step in range(0, last + 1, max(1, last // 7))]
    panels = []
    for title, column in (
        ("accuracy of training responses", "reward/by_source/{}/accuracy"),
        (f"accuracy on held-out problems, {metric}", f"evaluation/by_source/{{}}/{metric}"),
    ):
        lines = []
        for name, color in colors.items():
            of_task = column.format(name)
            points = [(row["step"], row[of_task]) for row in run.rows if of_task in row]
            if points:
                note = "" if name in trained else ", not trained on"
                lines.append(curves.Line(f"{name}{note}", color, [points]))
        panels.append(curves.Panel(title, "step", lines, ticks=ticks, end=last))
    return curves.draw(panels, per_row=3)


def apart(first: Estimate, last: Estimate) -> str:
    """Return yes if the intervals have no value in common."""
    ends = (first.low, first.high, last.low, last.high)
    if None in ends:
        return "-"
    low, high, low_after, high_after = ends
    return "yes" if high < low_after or high_after < low else "no"


def shown(estimate: Estimate) -> str:
    """Return the mean and its interval."""
    if estimate.low is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    run_dir = parser.parse_args().run
    try:
        run = read_run(run_dir)
        text = table(run)
        replace_file(run_dir / "before_after.md", text)
        replace_file(run_dir / "tasks.svg", picture(run))
    except UserError as error:
        print(f"before_after: {error}", file=sys.stderr)
        return 2
    print(f"held-out accuracy, with 95 % intervals over problems:\n\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

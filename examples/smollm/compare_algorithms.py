"""VAPO, DAPO and GRPO on the pretrained model, over seeds: `compare_algorithms.py [RUNS]`.

Reads the finished runs RUNS/seed_N/ALGORITHM of examples/run_vapo_smollm.sh (RUNS: runs/smollm).
Prints tables of held-out accuracy, and of what the critic knows of each task, and writes them to
RUNS/algorithms.md; RUNS/algorithms.svg has the curves. Runs in other directories beside these are
variants of VAPO, compared in a table of their own: give the script the setting that is changed and
logging.run_dir=runs/smollm/seed_N/VARIANT.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import before_after
from runner import curves, tables

from vapo_megatron.config.metrics import accuracy_name, metric_by
from vapo_megatron.data.storage import replace_file
from vapo_megatron.errors import DataError, UserError
from vapo_megatron.run.directory import Run, read_run

TITLES = {"vapo": "VAPO", "dapo": "DAPO", "grpo": "GRPO"}
"""By directory; the others are compared with the first one."""
OF_CRITIC = {
    "explained_variance": "explained variance",
    "value_error_mean": "mean error of the values",
}
NUM_STEPS = 5
"""Columns of the critic's table."""

Runs = Mapping[str, Mapping[int, Run]]
"""By algorithm and seed."""


def finished(root: Path, names: Iterable[str] = TITLES) -> Runs:
    """Read the runs that have their last evaluation; names: of their directories."""
    found: dict[str, dict[int, Run]] = {}
    for name in names:
        for path in sorted(root.glob(f"seed_*/{name}")):
            run = read_run(path)
            if run.rows and run.rows[-1]["step"] and accuracy_name(run.rows[-1]):
                found.setdefault(name, {})[int(path.parent.name.removeprefix("seed_"))] = run
    return found


def points(metric: str) -> Callable[[Run], list[tuple[float, float]]]:
    """Return what reads (step, value) of the rows that have a metric."""
    return lambda run: [(r["step"], r[metric]) for r in run.rows if r.get(metric) is not None]


def last(metric: str) -> tables.Measure:
    """Return what reads a metric's last value."""
    return lambda run: found[-1][1] if (found := points(metric)(run)) else None


def at(metric: str, step: float) -> tables.Measure:
    """Return what reads a metric's value in a step."""
    return lambda run: dict(points(metric)(run)).get(step)


def tasks_of(run: Run) -> list[str]:
    """Return the tasks of the evaluation, those that are trained on first."""
    trained = run.section("data").get("sources") or {}
    return sorted(
        run.section("evaluation").get("sources") or {}, key=lambda n: (n not in trained, n)
    )


def sampled(run: Run) -> list[tuple[int, float]]:
    """Return (responses sampled so far, share of the step's that were correct), step by step.

    Of dynamic sampling all responses count, also those of groups that were dropped.
    """
    algorithm, total, found = run.section("algorithm"), 0, []
    for row in run.rows:
        if (correct := row.get("reward/correct_fraction")) is not None:
            groups = row.get("rollout/groups_sampled")
            total += groups * algorithm["group_size"] if groups else algorithm["responses_per_step"]
            found.append((total, row.get("rollout/sampled_correct_fraction", correct)))
    return found


def algorithms_table(runs: Runs) -> str:
    """Return what each algorithm has sampled and reached, at equal numbers of responses too."""
    end = min(sampled(run)[-1][0] for of in runs.values() for run in of.values())

    def of_equal(run: Run) -> float:
        return statistics.fmean(right for total, right in sampled(run) if end / 2 < total <= end)

    columns = {
        "sampled responses": tables.mean(lambda run: sampled(run)[-1][0], ".0f"),
        f"correct of the {end // 2:g}th to {end:g}th": tables.compared(of_equal),
        "held out at last, tasks trained on": tables.compared(held_out),
    }
    return tables.of_finished("", TITLES, columns, runs)


def accuracy_table(runs: Runs) -> str:
    """Return held-out accuracy: a row for each task, columns for each algorithm."""
    some = next(iter(next(iter(runs.values())).values()))
    measured = str(accuracy_name(some.rows[-1])).removeprefix("evaluation/")
    evaluated = {
        name: [before_after.evaluated(r) for r in of.values()] for name, of in runs.items()
    }
    rows = []
    for task in tasks_of(some):
        metric = metric_by("evaluation", "source", task, measured)
        before = [points(metric)(run)[0][1] for of in runs.values() for run in of.values()]
        row = [task, tables.spread(before, ".3f")]
        for name, found in evaluated.items():
            ends = [[before_after.accuracy(e[task]) for e in (f.before, f.after)] for f in found]
            num_apart = sum(before_after.apart(*both) == "yes" for both in ends)
            row += [tables.compared(last(metric))(runs, name), f"{num_apart} of {len(found)}"]
        rows.append(row)
    columns = [column for name in runs for column in (TITLES[name], "apart")]
    return tables.markdown(["task", "before", *columns], rows)


def critic_table(runs: Runs) -> str:
    """Return what VAPO's critic knows of each task, by step; empty without runs of VAPO."""
    if "vapo" not in runs:
        return ""
    some = next(iter(runs["vapo"].values()))
    steps = [step for step, _ in points("critic/explained_variance")(some)]
    steps = sorted({steps[round(i * (len(steps) - 1) / (NUM_STEPS - 1))] for i in range(NUM_STEPS)})
    rows = []
    for what, title in OF_CRITIC.items():
        metrics = {"all": f"critic/{what}"}
        metrics |= {task: metric_by("critic", "source", task, what) for task in tasks_of(some)}
        for task, metric in metrics.items():
            cells = [tables.mean(at(metric, step), "+.2f")(runs, "vapo") for step in steps]
            if set(cells) != {"-"}:
                rows.append([title, task, *cells])
    return tables.markdown(["", "task", *(f"step {step:g}" for step in steps)], rows)


def variants_table(runs: Runs, variants: Runs) -> str:
    """Return VAPO and its variants, a row for each; empty without either."""
    if "vapo" not in runs or not variants:
        return ""
    arms = {"vapo": runs["vapo"], **variants}
    columns = {
        "training responses, second half": tables.compared(second_half("reward/correct_fraction")),
        "held out, tasks trained on": tables.compared(held_out),
        "explained variance": tables.mean(second_half("critic/explained_variance"), "+.2f"),
        "mean error of the values": tables.mean(second_half("critic/value_error_mean"), "+.2f"),
    }
    return tables.of_arms("", {name: TITLES.get(name, name) for name in arms}, columns, arms)


def second_half(metric: str) -> tables.Measure:
    """Return what reads a metric's mean over the second half of a run's steps."""

    def read(run: Run) -> float | None:
        values = [v for step, v in points(metric)(run) if step > run.rows[-1]["step"] / 2]
        return statistics.fmean(values) if values else None

    return read


def held_out(run: Run) -> float:
    """Return the accuracy of the last evaluation, mean over the tasks that are trained on."""
    trained, after = run.section("data")["sources"], before_after.evaluated(run).after
    return statistics.fmean(before_after.accuracy(after[task]).value for task in trained)


def picture(runs: Runs) -> str:
    """Return an SVG of the accuracy of training responses, all and by task, and of the critic."""
    some = next(iter(next(iter(runs.values())).values()))
    trained = sorted(some.section("data").get("sources") or {})
    metrics = {"accuracy of training responses": "reward/correct_fraction"}
    metrics |= {f"{name}": metric_by("reward", "source", name, "accuracy") for name in trained}
    metrics |= {"explained variance": "critic/explained_variance"}
    metrics |= {
        f"explained variance, {name}": metric_by("critic", "source", name, "explained_variance")
        for name in trained
    }
    panels = []
    for title, metric in metrics.items():
        lines = []
        for (name, of_seeds), color in zip(runs.items(), curves.COLORS):
            found = [points(metric)(run) for run in of_seeds.values()]
            if any(found):
                lines.append(curves.Line(TITLES[name], color, [one for one in found if one]))
        if lines:
            panels.append(curves.Panel(title, "step", lines))
    return curves.draw(panels)


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", type=Path, nargs="?", default=Path("runs/smollm"), metavar="RUNS")
    root = parser.parse_args().runs
    try:
        runs = finished(root)
        if not runs:
            raise DataError(
                f"{root} has no finished run seed_N/ALGORITHM; "
                "bash examples/run_vapo_smollm.sh --algorithm NAME --seed N makes one"
            )
        paths = root.glob("seed_*/*/metrics.jsonl")
        others = sorted({path.parent.name for path in paths} - TITLES.keys())
        variants = variants_table(runs, finished(root, others))
        seeds = ", ".join(f"{TITLES[name]} {len(of_seeds)}" for name, of_seeds in runs.items())
        text = (
            f"Held-out accuracy (seeds: {seeds}), mean +- deviation over seeds, and in how many\n"
            "of them the 95 % intervals before and after have no value in common:\n\n"
            f"{accuracy_table(runs)}\n{algorithms_table(runs)}\n"
            f"VAPO's critic, before each step's update:\n\n{critic_table(runs)}"
        )
        if variants:
            text += f"\nVAPO with one setting changed, means over its second half:\n\n{variants}"
        replace_file(root / "algorithms.md", text)
        replace_file(root / "algorithms.svg", picture(runs))
    except UserError as error:
        print(f"compare_algorithms: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

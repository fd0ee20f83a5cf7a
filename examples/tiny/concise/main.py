"""Concise reasoning by a second phase of reinforcement learning, after arXiv 2504.05185.

    bash examples/run_concise_tiny.sh [--seeds 0 1 2] [--quick]

For each seed: a base model whose chains of thought have checks that check nothing; a first phase
(DAPO, all problems) that makes it accurate and leaves the checks; and the second phase
(algorithms/concise.yaml) on 8 problems that it solves sometimes, which vapo select chooses. For
comparison, the same second phase on all problems, on 8 that are never solved, and on both eights.
Ends with a table of accuracy and length before and after, and a plot of the length against the
share of negative rewards. If interrupted, the same command resumes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from runner import command
from runner.jobs import Job, finished, metrics
from runner.samples import SAMPLES, read_samples

from concise.arms import QUICK, SETS, WHOLE, seed_jobs
from concise.results import Second, markdown, plot, second
from vapo_megatron.data.storage import replace_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs, write the table and the plot; return 1 if a job failed."""
    out = "runs/concise_tiny, with --quick runs/concise_tiny_quick"
    parser = command.options("concise", __doc__, out)
    command.add_seeds(parser)
    parser.add_argument(
        "--quick", action="store_true", help="a few small steps, which show that it works"
    )
    return command.main("concise", parser, plan, arguments)


def plan(args: argparse.Namespace) -> command.Plan:
    """Return what the arguments ask for."""
    name = "runs/concise_tiny_quick" if args.quick else "runs/concise_tiny"
    root, seeds = (args.out or Path(name)).resolve(), sorted(set(args.seeds))
    jobs = [job for seed in seeds for job in seed_jobs(root, seed, QUICK if args.quick else WHOLE)]
    return command.Plan(root, jobs, lambda: _write(root, jobs))


def _write(root: Path, jobs: Sequence[Job]) -> None:
    """Write table.md and lengths.svg of all second phases that are finished."""
    done = finished(jobs, (job.out.name for job in jobs))
    found: dict[str, dict[int, Second]] = {}
    for name in SETS:
        needed = [done.get(job, {}) for job in ("before", f"after_{name}", f"second_{name}")]
        for seed in sorted(set.intersection(*map(set, needed))):
            before, after, run = (of_seeds[seed] for of_seeds in needed)
            both = (read_samples(job.out / SAMPLES) for job in (before, after))
            found.setdefault(name, {})[seed] = second(*both, metrics(run))
    if found:
        text = markdown(found)
        replace_file(root / "table.md", text)
        replace_file(root / "lengths.svg", plot(found))
        print(f"\n{text}\n{root / 'table.md'}\n{root / 'lengths.svg'}")

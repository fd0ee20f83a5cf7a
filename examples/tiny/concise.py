"""Concise reasoning by a second phase of reinforcement learning, after arXiv 2504.05185.

    python examples/tiny/concise.py [--seeds 0 1 2] [--quick]

For each seed: a base model whose chains of thought have checks that check nothing; a first phase
(DAPO, all problems) that makes it accurate and leaves the checks; and the second phase
(algorithms/concise.yaml) on 8 problems that it solves sometimes, which vapo select chooses. For
comparison, the same second phase on all problems, on 8 that are never solved, and on both eights.
Ends with a table of accuracy and length before and after, and a plot of the length against the
share of negative rewards. If interrupted, the same command resumes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from ablation_jobs import Job, is_finished, require_unchanged  # noqa: E402
from ablation_runner import locked, run_jobs  # noqa: E402
from concise_jobs import QUICK, SAMPLES, SETS, WHOLE, seed_jobs  # noqa: E402
from concise_plot import plot  # noqa: E402
from concise_table import Second, markdown, measured, read_samples, second  # noqa: E402

from vapo_megatron.cli.command import Parser, run  # noqa: E402
from vapo_megatron.data.storage import replace_file  # noqa: E402
from vapo_megatron.errors import UserError  # noqa: E402
from vapo_megatron.run.directory import read_rows  # noqa: E402
from vapo_megatron.run.progress import format_seconds  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    """Run unfinished jobs, write the table and the plot; return 1 if a job failed."""
    parser = Parser(prog="run_concise_tiny.sh", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="seeds (0 1 2)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few small steps, which show that it works"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="concurrent runs (2)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="output directory (runs/concise_tiny, with --quick runs/concise_tiny_quick)",
    )  # fmt: skip
    parser.add_argument("--rerun", action="store_true", help="redo what other settings have made")
    # Closing the terminal sends SIGHUP, which nohup ignores.
    ending = [signal.SIGINT, signal.SIGTERM]
    ending += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return run(
        "concise", lambda: _concise(parser.parse_args(arguments)),
        interrupted="run the same command to resume", signals=ending,
    )  # fmt: skip


def _concise(args: argparse.Namespace) -> int:
    if args.jobs < 1 or min(args.seeds) < 0:
        raise UserError(f"--jobs {args.jobs} must be at least 1, and --seeds at least 0")
    started = time.monotonic()
    name = "runs/concise_tiny_quick" if args.quick else "runs/concise_tiny"
    root = (args.out or Path(name)).resolve()
    seeds = sorted(set(args.seeds))
    jobs = [job for seed in seeds for job in seed_jobs(root, seed, QUICK if args.quick else WHOLE)]
    with locked(root) as lock:
        require_unchanged(jobs, rerun=args.rerun)
        failures = run_jobs(
            jobs,
            slots=args.jobs,
            lock=lock,
            environment={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            cwd=ROOT,
            say=lambda line: print(line, flush=True),
        )
        _write(root, seeds, jobs)
    print(f"{format_seconds(time.monotonic() - started)} in this invocation")
    for name, why in failures.items():
        print(f"{name}: {why}", file=sys.stderr)
    return 1 if failures else 0


def _write(root: Path, seeds: Sequence[int], jobs: Sequence[Job]) -> None:
    """Write table.md and lengths.svg of all second phases of these seeds that are finished."""
    done = {job.name for job in jobs if is_finished(job)}
    found: dict[str, dict[int, Second]] = {}
    for name in SETS:
        for seed in seeds:
            needed = {f"seed_{seed}/{job}" for job in ("before", f"second_{name}", f"after_{name}")}
            if done >= needed:
                out = root / f"seed_{seed}"
                before, after = (
                    measured(read_samples(out / job / SAMPLES))
                    for job in ("before", f"after_{name}")
                )
                rows = read_rows(out / f"second_{name}" / "metrics.jsonl")
                found.setdefault(name, {})[seed] = second(before, after, rows)
    if found:
        text = markdown(found)
        replace_file(root / "table.md", text)
        replace_file(root / "lengths.svg", plot(found))
        print(f"\n{text}\n{root / 'table.md'}\n{root / 'lengths.svg'}")


if __name__ == "__main__":
    sys.exit(main())

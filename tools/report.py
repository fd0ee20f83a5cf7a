"""Show runs: report.html in the directory of one run, or one page that compares several.

python tools/report.py RUN
python tools/report.py RUN RUN [RUN ...] [--by-arm] [--output comparison.html]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vapo_megatron.cli.command import Parser, run
from vapo_megatron.errors import ConfigError
from vapo_megatron.run.report.comparison import build_comparison
from vapo_megatron.run.report.page import build_report


def main(arguments: list[str] | None = None) -> int:
    """Print the page's path; 0, 2 after an error that the user can put right, 130 interrupted."""
    return run(
        "report",
        lambda: _report(_parser().parse_args(arguments)),
        interrupted="nothing was written",
    )


def _report(options: argparse.Namespace) -> Path:
    if len(options.runs) > 1:
        return build_comparison(options.runs, options.output, by_arm=options.by_arm)
    for name in ("output", "by_arm"):
        if getattr(options, name):
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is for a comparison; give it two or more runs")
    return build_report(options.runs[0])


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, finished or not")
    parser.add_argument(
        "--by-arm",
        action="store_true",
        help="runs whose paths differ in a directory seed_N alone (ARM/seed_0, ARM/seed_1, or "
        "seed_0/ARM, seed_1/ARM) are one arm: its mean, and its lowest and highest run",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="a comparison's page (default: comparison.html beside the runs)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

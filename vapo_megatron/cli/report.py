"""Write an HTML report of a run, or one page that compares several.

  vapo report RUN                                   writes RUN/report.html
  vapo report RUN RUN [RUN ...] [--by-arm]          writes comparison.html beside the runs

The pages are self-contained. The run may still be in progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vapo_megatron.cli.command import Parser, run
from vapo_megatron.errors import ConfigError
from vapo_megatron.run.report.comparison import build_comparison
from vapo_megatron.run.report.page import build_report


def main(argv: Sequence[str] | None = None) -> int:
    """Print the page's path. Return 0; 2 for a user's mistake; 130 when interrupted."""
    return run("report", lambda: _report(argv), interrupted="nothing was written")


def _report(argv: Sequence[str] | None) -> Path:
    options = _parser().parse_args(argv)
    if len(options.runs) > 1:
        return build_comparison(options.runs, options.output, by_arm=options.by_arm)
    for name in ("output", "by_arm"):
        if getattr(options, name):
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is for a comparison; give it two or more runs")
    return build_report(options.runs[0])


def _parser() -> Parser:
    parser = Parser(prog="vapo report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    comparison = parser.add_argument_group("comparison")
    comparison.add_argument(
        "--by-arm", action="store_true",
        help="average runs whose paths differ only in a directory seed_N (ARM/seed_0, ARM/seed_1, "
        "or seed_0/ARM, seed_1/ARM), and show the lowest and the highest one",
    )  # fmt: skip
    comparison.add_argument(
        "--output", metavar="FILE", help="the page (default: comparison.html beside the runs)"
    )
    return parser

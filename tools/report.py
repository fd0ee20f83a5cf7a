"""Show runs: report.html in the directory of one run, or one page that compares several.

python tools/report.py RUN
python tools/report.py RUN RUN [RUN ...] [--output comparison.html]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vapo_megatron.errors import UserError
from vapo_megatron.report import build_report
from vapo_megatron.report_comparison import build_comparison


def main(arguments: list[str] | None = None) -> int:
    """Write the page and print its path; 2 after an error that the user can put right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, finished or not")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="a comparison's page (default: comparison.html beside the runs)",
    )
    args = parser.parse_args(arguments)
    try:
        if len(args.runs) > 1:
            print(build_comparison(args.runs, args.output))
        elif args.output:
            raise UserError("--output names a comparison's page; give it two or more runs")
        else:
            print(build_report(args.runs[0]))
    except (UserError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

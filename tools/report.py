"""Write report.html into run directories: python tools/report.py RUN [RUN ...]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vapo_megatron.errors import UserError
from vapo_megatron.report import build_report


def main(arguments: list[str] | None = None) -> int:
    """Build each run's report and print its path; 2 after an error that the user can put right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, finished or not")
    try:
        for run in parser.parse_args(arguments).runs:
            print(build_report(run))
    except (UserError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

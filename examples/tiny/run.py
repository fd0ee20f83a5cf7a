"""Run a miniature: `python examples/tiny/run.py NAME [options]`; NAME --help lists the options.

NAME is a folder beside this file, with a main.py whose `main` takes the options.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

NAMES = sorted(file.parent.name for file in Path(__file__).parent.glob("*/main.py"))

if __name__ == "__main__":
    if sys.argv[1:2] not in [[name] for name in NAMES]:
        sys.exit(f"run.py: give a miniature first: {', '.join(NAMES)}")
    sys.exit(importlib.import_module(f"{sys.argv[1]}.main").main(sys.argv[2:]))

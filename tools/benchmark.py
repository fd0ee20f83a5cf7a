#!/usr/bin/env python3
"""`vapo benchmark` from a checkout, without installing it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vapo_megatron.cli.benchmark.command import main

if __name__ == "__main__":
    sys.exit(main())

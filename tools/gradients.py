#!/usr/bin/env python3
"""`vapo gradients` from a checkout, without installing it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vapo_megatron.cli.gradients import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

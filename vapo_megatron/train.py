"""`python -m vapo_megatron.train`: see cli/train.py."""

import sys

from vapo_megatron.cli.train import main

if __name__ == "__main__":
    sys.exit(main())

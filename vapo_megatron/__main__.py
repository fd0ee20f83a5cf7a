"""`python -m vapo_megatron`, the command `vapo`: see cli/main.py."""

import sys

from vapo_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""`vapo convert to-megatron` from a checkout, without installing it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vapo_megatron.cli.convert import main as convert


def main(arguments: list[str] | None = None) -> int:
    """Return the command's exit code."""
    return convert(["to-megatron", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())

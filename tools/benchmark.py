#!/usr/bin/env python3
"""Measure parts of the package against their plain counterparts, both in the same run.

python tools/benchmark.py gae         packed GAE against a masked loop over a right-padded batch
python tools/benchmark.py logprobs    fused log-probabilities against logits in full
python tools/benchmark.py reshard     weights into vLLM by a plan against full tensors gathered
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tools import benchmark_gae, benchmark_logprobs, benchmark_reshard


def main(argv: list[str] | None = None) -> None:
    """Run one subcommand."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    benchmark_gae.add_command(commands)
    benchmark_logprobs.add_command(commands)
    benchmark_reshard.add_command(commands)
    arguments = parser.parse_args(argv)
    for name, value in vars(arguments).items():
        if isinstance(value, int) and name != "seed" and value < 1:
            parser.error(f"--{name.replace('_', '-')}={value} must be at least 1")
    try:
        on_gpu = torch.device(arguments.device).type == "cuda"
    except RuntimeError as error:
        parser.error(f"--device={arguments.device}: {str(error).splitlines()[0]}")
    if on_gpu and not torch.cuda.is_available():
        parser.error(f"--device={arguments.device}: torch finds no GPU here; leave it out")
    try:
        arguments.run(arguments)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()

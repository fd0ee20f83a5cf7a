"""Time parts of the package against plain counterparts, both in the same run.

  vapo benchmark gae         packed GAE against a masked loop over a right-padded batch
  vapo benchmark logprobs    fused log-probabilities against full logits: time and peak memory
  vapo benchmark reshard     weight sync into vLLM by a plan against a gather of full tensors

Compare the ratios between machines, not the seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vapo_megatron.cli.benchmark import gae, logprobs, reshard
from vapo_megatron.cli.command import Parser, run
from vapo_megatron.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 2 for a user's mistake; 130 when interrupted."""
    return run("benchmark", lambda: _benchmark(argv), interrupted="nothing was written")


def _benchmark(argv: Sequence[str] | None) -> None:
    parser = Parser(prog="vapo benchmark", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="gae | logprobs | reshard")
    for module in (gae, logprobs, reshard):
        module.add_command(commands)
    options = parser.parse_args(argv)
    for name, value in vars(options).items():
        if isinstance(value, int) and name != "seed" and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}={value} must be at least 1")
    try:
        on_gpu = torch.device(options.device).type == "cuda"
    except RuntimeError as error:
        raise ConfigError(f"--device={options.device}: {str(error).splitlines()[0]}") from None
    if on_gpu and not torch.cuda.is_available():
        raise ConfigError(f"--device={options.device}: torch finds no GPU here; leave it out")
    options.measure(options)

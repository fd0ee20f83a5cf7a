"""Compare the gradients of two layouts, parameter by parameter, on rollouts that a run dumped.

  vapo gradients collect --config run.yaml --replay RUN --out A
  vapo gradients collect --config run.yaml --replay RUN --out B parallel.world_size=2 \\
      parallel.tensor_model_parallel_size=2
  vapo gradients compare A B

A run dumps its rollouts with logging.dump_steps.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from vapo_megatron.cli.checks.paths import require_paths
from vapo_megatron.cli.command import Parser, is_first_rank, run, under_torchrun
from vapo_megatron.cli.torchrun import execute, torchrun_command
from vapo_megatron.config import load_config
from vapo_megatron.errors import ConfigError
from vapo_megatron.parallel.environment import check_processes

COLLECT = """Write the gradients of one layout.

  vapo gradients collect --config run.yaml --replay RUN --out A

It makes one step on dumped rollouts with the weights of model.hf_path, up to the gradients of the
critic's and the actor's first mini-batch, and writes them by HF name, in float32, before clipping.
parallel.world_size processes start as with vapo train. With --update it also makes each role's
first update, at a learning rate of 1, and writes what it adds to the weights: what the optimizer
makes of the gradients. AdamW brings all elements to one size, also those whose gradient is rounding
alone, such as a key's bias.
"""

COMPARE = """Print |a - b| / |a| of every parameter's gradient, the largest first.

  vapo gradients compare A B --tolerance 1e-4

The exit code is 1 if one exceeds the tolerance.
"""


def main(argv: Sequence[str]) -> int:
    """Return 0; 1 if gradients differ; 2 for a user's mistake; 130 when interrupted."""

    def work() -> int:
        parser = _parser()
        # Options may stand between fields; argparse cannot have that (intermixed) in subcommands.
        options, more = parser.parse_known_args(argv)
        if any(text.startswith("-") or "overrides" not in options for text in more):
            parser.error(f"unrecognized arguments: {' '.join(more)}")
        if more:
            options.overrides += more
        return options.work(options, ["-m", "vapo_megatron", "gradients", *argv])

    # torchrun ends workers with SIGTERM: they have nothing to report or clean up.
    return run("gradients", work, interrupted="nothing was compared", signals=[signal.SIGINT])


def _collect(options: argparse.Namespace, worker: Sequence[str]) -> int:
    if options.step < 1:
        raise ConfigError(f"--step={options.step} must be at least 1, the first step")
    config = load_config(options.config, options.overrides).colocated()
    require_paths(config, options.replay, writes=False)
    from vapo_megatron.cli.gradient_check import check, collect_gradients, describe_gradients

    if config.parallel.world_size > 1 and not under_torchrun():
        command = torchrun_command(os.environ, config.parallel.world_size, worker)
        check(config, options.replay, options.step)
        execute(command)
    check_processes(config.parallel.world_size, config.rollout.num_processes)
    collect_gradients(config, options.replay, options.step, options.out, update=options.update)
    if is_first_rank():
        print(describe_gradients(options.out), flush=True)
    return 0


def _compare(options: argparse.Namespace, worker: Sequence[str]) -> int:
    from vapo_megatron.cli.gradient_check import compare_gradients, describe_gradients

    differences = compare_gradients(options.a, options.b)
    print(describe_gradients(options.a))
    print(describe_gradients(options.b))
    print("\n|a - b| / |a|        |a|  parameter")
    for d in differences:
        print(f"{d.relative:13.2e} {d.norm:10.3e}  {d.name}")
    silent = sum(d.norm == 0 for d in differences)
    if silent:
        print(
            f"\n{silent} of {len(differences)} parameters have no gradient in a: a value head of "
            "zeros passes none on, set model.value_head_init_std; nor does an adapter's B, which "
            "is 0 at first, set model.lora.path"
        )
    over = [d for d in differences if not d.relative <= options.tolerance]
    verdict = f"{len(over)} exceed" if over else "none exceeds"
    print(f"\n{len(differences)} parameters: {verdict} the tolerance {options.tolerance:g}")
    return 1 if over else 0


def _parser() -> Parser:
    parser = Parser(prog="vapo gradients", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="collect | compare")
    collect = commands.add_parser(
        "collect", help="write the gradients of one layout", description=COLLECT
    )
    collect.add_argument(
        "--config", action="append", required=True, metavar="FILE", help="as for training"
    )
    collect.add_argument(
        "--replay", type=Path, required=True, metavar="RUN",
        help="run directory with dumped steps (logging.dump_steps)",
    )  # fmt: skip
    collect.add_argument(
        "--out", type=Path, required=True, metavar="DIR",
        help="for actor.safetensors and, of a run with a critic, critic.safetensors",
    )  # fmt: skip
    collect.add_argument(
        "--step", type=int, default=1, metavar="N", help="which dumped step (default: 1)"
    )
    collect.add_argument(
        "--update", action="store_true", help="also write each role's first update"
    )
    collect.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="such as another layout"
    )
    collect.set_defaults(work=_collect)
    compare = commands.add_parser(
        "compare", help="print every parameter's difference", description=COMPARE
    )
    compare.add_argument("a", type=Path, metavar="A", help="directory that collect wrote")
    compare.add_argument("b", type=Path, metavar="B", help="that of the other layout")
    compare.add_argument(
        "--tolerance", type=float, default=1e-5, metavar="X",
        help="largest |a - b| / |a| (default: %(default)g, for model.dtype=float32)",
    )  # fmt: skip
    compare.set_defaults(work=_compare)
    return parser

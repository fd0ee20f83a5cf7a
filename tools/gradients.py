"""Compare two layouts' gradients, parameter by parameter, on the responses that a run dumped.

torchrun --nproc-per-node N tools/gradients.py collect --config FILE --replay RUN --out A
torchrun --nproc-per-node M tools/gradients.py collect --config FILE --replay RUN --out B \\
    parallel.world_size=M parallel.tensor_model_parallel_size=...
python tools/gradients.py compare A B
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vapo_megatron.cli.command import Parser, check_processes
from vapo_megatron.cli.preflight import require_paths
from vapo_megatron.config import load_config
from vapo_megatron.errors import ConfigError, UserError, tell


def main(arguments: list[str] | None = None) -> int:
    """Return 0; 1 when gradients differ; 2 after an error that the user can put right."""
    try:
        options = _parser().parse_args(arguments)
        return options.run(options)
    except (UserError, OSError) as error:
        tell(f"gradients: {error}")
        return 2


def _collect(options: argparse.Namespace) -> int:
    if options.step < 1:
        raise ConfigError(f"--step {options.step} must be at least 1, the first step")
    config = load_config(options.config, options.overrides)
    require_paths(config, options.replay, writes=False)
    check_processes(config)
    from vapo_megatron.cli.gradient_check import collect_gradients, describe_gradients

    collect_gradients(config, options.replay, options.step, options.out)
    if os.environ["RANK"] == "0":
        print(describe_gradients(options.out), flush=True)
    return 0


def _compare(options: argparse.Namespace) -> int:
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
            "zeros passes none on, set model.value_head_init_std"
        )
    over = [d for d in differences if not d.relative <= options.tolerance]
    verdict = f"{len(over)} exceed" if over else "none exceeds"
    print(f"\n{len(differences)} parameters: {verdict} the tolerance {options.tolerance:g}")
    return 1 if over else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    collect = commands.add_parser(
        "collect",
        help="write a layout's gradients; under torchrun, with as many processes as it has",
        description="Make one step on dumped responses with the weights of model.hf_path, up to "
        "the finished gradients of the critic's and the actor's first mini-batch, and write them "
        "by HF name, float32, before clipping. Nothing is updated.",
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
        help="where actor.safetensors and, of a run with a critic, critic.safetensors go",
    )  # fmt: skip
    collect.add_argument("--step", type=int, default=1, help="which dumped step (default 1)")
    collect.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="such as another layout"
    )
    collect.set_defaults(run=_collect)
    compare = commands.add_parser(
        "compare",
        help="print every parameter's difference; exit code 1 when one exceeds the tolerance",
        description="Print |a - b| / |a| of every parameter's gradient, the largest first. The "
        "exit code is 1 when one exceeds the tolerance.",
    )
    compare.add_argument("a", type=Path, metavar="A", help="directory that collect wrote")
    compare.add_argument("b", type=Path, metavar="B", help="the other layout's")
    compare.add_argument(
        "--tolerance", type=float, default=1e-5,
        help="largest |a - b| / |a| (default %(default)g, for model.dtype=float32)",
    )  # fmt: skip
    compare.set_defaults(run=_compare)
    return parser


if __name__ == "__main__":
    sys.exit(main())

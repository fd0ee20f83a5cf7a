"""Plans without a GPU: tools/plan.py reshard --model Qwen2.5-32B --tp 8 --pp 4 --vllm-tp 8."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vapo_megatron.config import ParallelConfig
from vapo_megatron.errors import ConfigError, UserError
from vapo_megatron.models.hf_config import (
    ModelShape,
    check_layout,
    parameter_count,
    read_model_shape,
)
from vapo_megatron.models.known import KNOWN_MODELS, known_shape


def main(arguments: list[str] | None = None) -> int:
    """Print a plan; 2 after an error that the user can put right."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add_reshard(commands.add_parser("reshard", help="what the weights' way into vLLM costs"))
    options = parser.parse_args(arguments)
    try:
        print(options.run(options))
    except UserError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0


def positive(text: str) -> int:
    """Read a number of things of which there is at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def speed(text: str) -> float:
    """Read a bandwidth."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value} must be more than 0")
    return value


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which model runs on which ranks."""
    known = ", ".join(KNOWN_MODELS)
    parser.add_argument("--model", required=True, help=f"{known}, or a directory with config.json")
    parser.add_argument("--nodes", type=positive, default=16, help="default: %(default)s")
    parser.add_argument("--gpus-per-node", type=positive, default=8, help="default: %(default)s")
    parser.add_argument(
        "--tp", type=positive, required=True, help="the trainer's tensor parallelism"
    )
    parser.add_argument(
        "--pp", type=positive, required=True, help="the trainer's pipeline parallelism"
    )
    parser.add_argument(
        "--vpp", type=positive, default=1, help="model chunks of each rank (default: 1)"
    )
    parser.add_argument("--vllm-tp", type=positive, required=True, help="ranks of one vLLM replica")


def shape_and_data_parallelism(options: argparse.Namespace) -> tuple[ModelShape, int]:
    """Read the model and check the trainer's layout as a run would."""
    is_directory = Path(options.model).is_dir()
    shape = read_model_shape(options.model) if is_directory else known_shape(options.model)
    world_size = options.nodes * options.gpus_per_node
    parallel = ParallelConfig(
        world_size=world_size,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vpp if options.vpp > 1 else None,
    )
    check_layout(shape, parallel)
    if options.vpp > 1 and options.pp == 1:
        raise ConfigError(f"--vpp={options.vpp} must be 1 with --pp=1: chunks divide a pipeline")
    if world_size % (options.tp * options.pp):
        raise ConfigError(
            f"--nodes={options.nodes} * --gpus-per-node={options.gpus_per_node} must be a multiple "
            f"of --tp={options.tp} * --pp={options.pp}; change one of them"
        )
    return shape, parallel.data_parallel_size


def add_reshard(parser: argparse.ArgumentParser) -> None:
    """Describe the subcommand."""
    add_model(parser)
    parser.add_argument(
        "--nvlink",
        type=speed,
        default=900.0,
        metavar="GB/s",
        help="of one GPU, both directions together (default: %(default)s)",
    )
    parser.add_argument(
        "--network",
        type=speed,
        default=50.0,
        metavar="GB/s",
        help="of one GPU, each way (default: %(default)s)",
    )
    parser.add_argument("--per-rank", action="store_true", help="print each rank's bytes")
    parser.set_defaults(run=reshard)


def reshard(options: argparse.Namespace) -> str:
    """Compare the plan that moves missing bytes with gathering every tensor on every rank."""
    # These load torch; a wrong option is answered before.
    from vapo_megatron.weights import reshard_cost, shards
    from vapo_megatron.weights.reshard import make_plan

    shape, dp_size = shape_and_data_parallelism(options)
    trainer = shards.trainer_layout(
        shape, tp_size=options.tp, pp_size=options.pp, vpp_size=options.vpp, dp_size=dp_size
    )
    cluster = reshard_cost.Cluster(
        gpus_per_node=options.gpus_per_node,
        nvlink_gb_per_second=options.nvlink,
        network_gb_per_second=options.network,
    )
    started = time.perf_counter()
    plans = [
        make_plan(shape, trainer, options.vllm_tp, gpus_per_node=options.gpus_per_node, relay=relay)
        for relay in (True, False)
    ]
    planned = time.perf_counter() - started
    costs = {
        "plan": reshard_cost.plan_cost(plans[0], cluster),
        "without relays": reshard_cost.plan_cost(plans[1], cluster),
        "full gather": reshard_cost.full_gather_cost(shape, trainer, options.vllm_tp, cluster),
    }
    return (
        f"{options.model}: {parameter_count(shape) / 1e9:.2f}e9 parameters in bfloat16, "
        f"{options.nodes} nodes x {options.gpus_per_node} GPUs\n"
        f"trainer TP {options.tp} x PP {options.pp} (VPP {options.vpp}) x DP {dp_size} -> "
        f"{trainer.world_size // options.vllm_tp} vLLM replicas of TP {options.vllm_tp}; "
        f"planned in {planned:.1f} s\n\n{reshard_cost.describe(costs, per_rank=options.per_rank)}"
    )


if __name__ == "__main__":
    sys.exit(main())

"""Plans a run without a GPU: which layouts fit, what they fill of each GPU, how long they take.

python tools/plan.py --model Qwen2.5-32B --gpus 128 --gpu-memory 80GB
python tools/plan.py reshard --model Qwen2.5-32B --tp 8 --pp 4 --vllm-tp 8
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import sys
import time
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vapo_megatron.config import ParallelConfig, VapoConfig, load_config
from vapo_megatron.errors import ConfigError, UserError
from vapo_megatron.models.hf_config import (
    ModelShape,
    check_layout,
    parameter_count,
    read_model_shape,
)
from vapo_megatron.models.known import KNOWN_MODELS, known_shape
from vapo_megatron.planning import describe
from vapo_megatron.planning.candidates import RECOMPUTE, Fixed
from vapo_megatron.planning.cluster import GPUS, Cluster
from vapo_megatron.planning.plan import resharding_seconds
from vapo_megatron.planning.ranking import rank
from vapo_megatron.planning.workload import workload_of

SHARES = ("matmul", "attention", "memory", "decode", "nvlink", "network", "pcie")


def main(arguments: list[str] | None = None) -> int:
    """Print a plan; 1 where nothing fits, 2 after an error that the user can put right."""
    arguments = sys.argv[1:] if arguments is None else arguments
    resharding = arguments[:1] == ["reshard"]
    parser = _Parser(
        prog="plan.py reshard" if resharding else "plan.py",
        usage=None if resharding else "plan.py --model MODEL --gpus N [options] | reshard --help",
        description="What the weights' way into vLLM costs." if resharding else __doc__,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100),
    )
    (add_reshard if resharding else add_plan)(parser)
    options = parser.parse_args(arguments[resharding:])
    try:
        text, code = reshard(options) if resharding else plan(options)
    except UserError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    print(text)
    return code


class _Parser(argparse.ArgumentParser):
    """Tells a mistake as every other one is told: in one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print what argparse found, without the usage."""
        self.exit(2, f"plan: {message}; --help shows what there is\n")


def positive(text: str) -> int:
    """Read a number of things of which there is at least one."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def speed(text: str) -> float:
    """Read a bandwidth."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value} must be more than 0")
    return value


def size(text: str) -> int:
    """Read bytes: 80GB are 80e9, 80GiB are 80 * 2**30."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GB|GiB|TB)", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} must read like 80GB, 141GB or 79.6GiB")
    unit = {"gb": 10**9, "gib": 2**30, "tb": 10**12}[found[2].lower()]
    value = int(float(found[1]) * unit)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} must be more than 0")
    return value


def fraction(text: str) -> float:
    """Read a share of something."""
    value = speed(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{value} must be at most 1")
    return value


def share(text: str) -> tuple[str, float]:
    """Read NAME=X."""
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if name not in SHARES or not 0 < number <= 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} must read NAME=X with X in (0, 1] and NAME one of {', '.join(SHARES)}"
        )
    return f"{name}_share", number


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Describe the options of a plan."""
    add_model(parser)
    parser.add_argument("--top", type=positive, default=12, help="rows (default: %(default)s)")
    add_cluster(parser.add_argument_group("cluster"))
    add_workload(parser.add_argument_group("workload (default: the configuration's)"))
    add_layout(
        parser.add_argument_group("layout (in brackets: what is tried where nothing is given)")
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the option that says which model runs."""
    known = ", ".join(KNOWN_MODELS)
    parser.add_argument(
        "--model", required=True, help=f"HF directory or its config.json, or one of {known}"
    )


def add_cluster(group: argparse._ArgumentGroup) -> None:
    """Add what a job runs on."""
    defaults = Cluster(num_gpus=1)
    group.add_argument("--gpus", type=positive, required=True, help="of the whole job")
    group.add_argument(
        "--gpus-per-node", type=positive, default=8, metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--gpu", choices=GPUS, default="H100", help="whose data sheet (default: %(default)s)"
    )
    group.add_argument("--gpu-memory", type=size, metavar="80GB", help="default: the data sheet's")
    for name, unit, what in (
        ("tflops", "TFLOP/s", "dense bfloat16 (default: the data sheet's)"),
        ("hbm", "GB/s", "a GPU's memory (default: the data sheet's)"),
        ("nvlink", "GB/s", "of a GPU, both ways together (default: the data sheet's)"),
        ("network", "GB/s", f"of a GPU, each way (default: {defaults.network_gb_per_second:g})"),
        ("pcie", "GB/s", f"of a GPU, each way (default: {defaults.pcie_gb_per_second:g})"),
        ("storage", "GB/s", f"of the job, written (default: {defaults.storage_gb_per_second:g})"),
    ):
        group.add_argument(f"--{name}", type=speed, metavar=unit, help=what)
    values = ", ".join(f"{name} {getattr(defaults, f'{name}_share'):g}" for name in SHARES)
    group.add_argument(
        "--share",
        type=share,
        action="append",
        default=[],
        metavar="NAME=X",
        help=f"share of a peak that is reached (default: {values})",
    )


def add_workload(group: argparse._ArgumentGroup) -> None:
    """Add what a step does."""
    group.add_argument(
        "--config", action="append", default=[], metavar="FILE",
        help="YAML of the run; its layout is left out of account",
    )  # fmt: skip
    for option, what in (
        ("--responses", "responses in a step"),
        ("--group-size", "responses to a prompt"),
        ("--mini-batch", "responses in an update"),
        ("--max-prompt", "tokens of the longest prompt"),
        ("--max-response", "tokens of the longest response"),
        ("--prompt", "tokens of a prompt, mean (default: 256)"),
        ("--response", "tokens of a response, mean (default: half of the longest)"),
    ):
        group.add_argument(option, type=positive, metavar="N", help=what)
    group.add_argument(
        "--vllm-sequences", type=positive, metavar="N", help="that a replica samples at once"
    )
    group.add_argument("--no-critic", action="store_true", help="as in GRPO")
    group.add_argument(
        "--reference", action="store_true", help="log-probabilities of a reference policy, too"
    )


def add_layout(group: argparse._ArgumentGroup) -> None:
    """Add what can be chosen instead of searched for."""
    for option, what in (
        ("--tp", "the trainer's tensor parallelism (all sizes within a node)"),
        ("--pp", "the trainer's pipeline parallelism"),
        ("--vpp", "model chunks of each rank (1, 2, 4)"),
        ("--vllm-tp", "ranks of one vLLM replica (all sizes within a node)"),
        ("--max-tokens", "budget of a micro-batch (half, once and twice the longest sequence)"),
    ):
        group.add_argument(option, type=positive, metavar="N", help=what)
    group.add_argument("--recompute", choices=RECOMPUTE, help="activations computed again")
    group.add_argument("--offload", choices=("yes", "no"), help="what is not at work to hosts")
    group.add_argument(
        "--vllm-share",
        type=fraction,
        metavar="X",
        help="rollout.gpu_memory_utilization (the largest up to .9 that fits)",
    )


def plan(options: argparse.Namespace) -> tuple[str, int]:
    """Rank layouts, and show the first one in detail."""
    shape, cluster = model_shape(options.model), cluster_of(options)
    base = base_config(options)
    workload = workload_of(
        base,
        mean_response_tokens=options.response,
        prompt_tokens=options.prompt,
        critic=not options.no_critic,
        reference=options.reference,
    )
    fixed = Fixed(
        tensor=options.tp,
        pipeline=options.pp,
        virtual=options.vpp,
        recompute=options.recompute,
        max_tokens=options.max_tokens,
        offload=None if options.offload is None else options.offload == "yes",
        sampler_tensor=options.vllm_tp,
        sampler_share=options.vllm_share,
    )
    ranking = rank(shape, base, cluster, workload, fixed)
    table = describe.describe_ranking(ranking, options.top)
    job = describe.describe_job(options.model, shape, cluster, workload)
    if not ranking.plans:
        return f"{job}\n\nnothing fits\n{table}", 1
    best = ranking.plans[0]
    parts = (
        job,
        table,
        describe.describe_plan(shape, best, resharding_seconds(shape, best)),
        "to paste:\n" + describe.to_paste(best.config).rstrip(),
        describe.describe_notes(),
    )
    return "\n\n".join(parts), 0


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Take the data sheet's figures where none are given.

    Raises:
        ConfigError: nodes would be of different sizes.
    """
    sheet, per_node = GPUS[options.gpu], min(options.gpus_per_node, options.gpus)
    if options.gpus % per_node:
        raise ConfigError(
            f"--gpus={options.gpus} must be a multiple of --gpus-per-node={per_node}; change one"
        )
    cluster = Cluster(
        num_gpus=options.gpus,
        gpus_per_node=per_node,
        gpu_bytes=options.gpu_memory or int(sheet.memory_gb * 10**9),
        peak_tflops=options.tflops or sheet.peak_tflops,
        memory_gb_per_second=options.hbm or sheet.memory_gb_per_second,
        nvlink_gb_per_second=options.nvlink or sheet.nvlink_gb_per_second,
    )
    given = {
        f"{name}_gb_per_second": getattr(options, name)
        for name in ("network", "pcie", "storage")
        if getattr(options, name)
    }
    return dataclasses.replace(cluster, **given, **dict(options.share))


def base_config(options: argparse.Namespace) -> VapoConfig:
    """Return the run's configuration with the number of GPUs, and no layout yet."""
    fields = {
        # What the number of GPUs allows depends on the layout.
        "parallel.world_size": 1,
        "parallel.tensor_model_parallel_size": 1,
        "parallel.pipeline_model_parallel_size": 1,
        "parallel.virtual_pipeline_model_parallel_size": "null",
        "parallel.sequence_parallel": "false",
        "parallel.overlap_grad_reduce": None if options.config else "true",
        "parallel.overlap_param_gather": None if options.config else "true",
        "rollout.tensor_model_parallel_size": 1,
        "rollout.max_num_sequences": options.vllm_sequences,
        "rollout.max_prompt_tokens": options.max_prompt,
        "rollout.max_response_tokens": options.max_response,
        "algorithm.responses_per_step": options.responses,
        "algorithm.group_size": options.group_size,
        "algorithm.mini_batch_size": options.mini_batch,
    }
    given = [f"{name}={value}" for name, value in fields.items() if value is not None]
    config = load_config(options.config, given)
    parallel = config.parallel.model_copy(update={"world_size": options.gpus})
    return config.model_copy(update={"parallel": parallel})


def model_shape(model: str) -> ModelShape:
    """Read a directory or its config.json, or take a known model's sizes."""
    path = Path(model)
    if path.name == "config.json":
        return read_model_shape(path.parent)
    return read_model_shape(path) if path.is_dir() else known_shape(model)


def shape_and_data_parallelism(options: argparse.Namespace) -> tuple[ModelShape, int]:
    """Read the model and check the trainer's layout as a run would."""
    shape = model_shape(options.model)
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
    parser.add_argument("--nodes", type=positive, default=16, help="default: %(default)s")
    parser.add_argument("--gpus-per-node", type=positive, default=8, help="default: %(default)s")
    for option, what in (
        ("--tp", "the trainer's tensor parallelism"),
        ("--pp", "the trainer's pipeline parallelism"),
        ("--vllm-tp", "ranks of one vLLM replica"),
    ):
        parser.add_argument(option, type=positive, required=True, help=what)
    parser.add_argument(
        "--vpp", type=positive, default=1, help="model chunks of each rank (default: 1)"
    )
    for option, default, what in (
        ("--nvlink", 900.0, "of one GPU, both directions together"),
        ("--network", 50.0, "of one GPU, each way"),
    ):
        parser.add_argument(
            option, type=speed, default=default, metavar="GB/s",
            help=f"{what} (default: %(default)s)",
        )  # fmt: skip
    parser.add_argument("--per-rank", action="store_true", help="print each rank's bytes")


def reshard(options: argparse.Namespace) -> tuple[str, int]:
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
    text = (
        f"{options.model}: {parameter_count(shape) / 1e9:.2f}e9 parameters in bfloat16, "
        f"{options.nodes} nodes x {options.gpus_per_node} GPUs\n"
        f"trainer TP {options.tp} x PP {options.pp} (VPP {options.vpp}) x DP {dp_size} -> "
        f"{trainer.world_size // options.vllm_tp} vLLM replicas of TP {options.vllm_tp}; "
        f"planned in {planned:.1f} s\n\n{reshard_cost.describe(costs, per_rank=options.per_rank)}"
    )
    return text, 0


if __name__ == "__main__":
    sys.exit(main())

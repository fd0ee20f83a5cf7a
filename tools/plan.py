"""Plans a run without a GPU: which layouts fit, what they fill of each GPU, how long they take.

python tools/plan.py --model Qwen2.5-32B --gpus 128 --gpu-memory 80GB
python tools/plan.py reshard --model Qwen2.5-32B --tp 8 --pp 4 --vllm-tp 8
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.plan_options import Parser, add_plan, add_reshard
from vapo_megatron.config import ParallelConfig, VapoConfig, load_config
from vapo_megatron.errors import ConfigError, UserError
from vapo_megatron.models.hf_config import ModelShape, check_layout, parameter_count
from vapo_megatron.models.known import shape_of
from vapo_megatron.planning import describe
from vapo_megatron.planning.cluster import GB, GPUS, Cluster
from vapo_megatron.planning.plan import resharding_seconds
from vapo_megatron.planning.ranking import Fixed, rank
from vapo_megatron.planning.workload import workload_of


def main(arguments: list[str] | None = None) -> int:
    """Print a plan; 2 after an error that the user can put right, or where nothing fits."""
    arguments = sys.argv[1:] if arguments is None else arguments
    resharding = arguments[:1] == ["reshard"]
    parser = Parser(
        prog="plan.py reshard" if resharding else "plan.py",
        usage=None if resharding else "plan.py --model MODEL --gpus N [options] | reshard --help",
        description="What the weights' way into vLLM costs." if resharding else __doc__,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100),
    )
    (add_reshard if resharding else add_plan)(parser)
    options = parser.parse_args(arguments[resharding:])
    try:
        text, refusal = (reshard(options), None) if resharding else plan(options)
        print(text)
        if refusal is not None:
            raise UserError(refusal)
    except UserError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0


def plan(options: argparse.Namespace) -> tuple[str, str | None]:
    """Rank layouts, and show the first ones in detail; return why nothing fits, if nothing does."""
    shape, cluster = shape_of(options.model), cluster_of(options)
    base = base_config(options)
    workload = workload_of(
        base,
        mean_response_tokens=options.response,
        prompt_tokens=options.prompt,
        spread=options.spread,
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
        closest = describe.describe_closest(shape, ranking, cluster)
        return f"{job}\n\n{table}\n\n{closest}", describe.nothing_fits(ranking, cluster)
    shown = [
        describe.describe_plan(shape, one, resharding_seconds(shape, one))
        for one in ranking.plans[: options.details]
    ]
    pasted = "to paste:\n" + describe.to_paste(ranking.plans[0].config).rstrip()
    return "\n\n".join([job, table, *shown, pasted, describe.describe_notes()]), None


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
        network_gb_per_second=options.network or sheet.network_gb_per_second,
        pcie_gb_per_second=options.pcie or sheet.pcie_gb_per_second,
        **dict(options.share),
    )
    storage = options.storage or cluster.storage_gb_per_second
    return dataclasses.replace(cluster, storage_gb_per_second=storage)


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
        "parallel.host_memory_gb": options.host_memory and options.host_memory / GB,
        "rollout.tensor_model_parallel_size": 1,
        "rollout.max_num_sequences": options.vllm_sequences,
        "rollout.max_prompt_tokens": options.max_prompt,
        "rollout.max_response_tokens": options.max_response,
        "algorithm.responses_per_step": options.responses,
        "algorithm.group_size": options.group_size,
        "algorithm.mini_batch_size": options.mini_batch,
    }
    if options.no_critic:
        fields |= {"algorithm.advantage_estimator": "grpo", "algorithm.value_pretraining_steps": 0}
    if options.reference:
        fields["algorithm.kl_coef"] = 0.001  # Any: the plan is the same.
    given = [f"{name}={value}" for name, value in fields.items() if value is not None]
    config = load_config(options.config, given)
    parallel = config.parallel.model_copy(update={"world_size": options.gpus})
    return config.model_copy(update={"parallel": parallel})


def shape_and_data_parallelism(options: argparse.Namespace) -> tuple[ModelShape, int]:
    """Read the model and check the trainer's layout as a run would."""
    shape = shape_of(options.model)
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


def reshard(options: argparse.Namespace) -> str:
    """Compare the plan that moves missing bytes with gathering every tensor on every rank."""
    # These load torch; a wrong option is answered before.
    from vapo_megatron.weights.reshard import cost, shards
    from vapo_megatron.weights.reshard.planner import make_plan

    shape, dp_size = shape_and_data_parallelism(options)
    trainer = shards.trainer_layout(
        shape, tp_size=options.tp, pp_size=options.pp, vpp_size=options.vpp, dp_size=dp_size
    )
    cluster = cost.Cluster(
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
        "plan": cost.plan_cost(plans[0], cluster),
        "without relays": cost.plan_cost(plans[1], cluster),
        "full gather": cost.full_gather_cost(shape, trainer, options.vllm_tp, cluster),
    }
    return (
        f"{options.model}: {parameter_count(shape) / 1e9:.2f}e9 parameters in bfloat16, "
        f"{options.nodes} nodes x {options.gpus_per_node} GPUs\n"
        f"trainer TP {options.tp} x PP {options.pp} (VPP {options.vpp}) x DP {dp_size} -> "
        f"{trainer.world_size // options.vllm_tp} vLLM replicas of TP {options.vllm_tp}; "
        f"planned in {planned:.1f} s\n\n{cost.describe(costs, per_rank=options.per_rank)}"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main())

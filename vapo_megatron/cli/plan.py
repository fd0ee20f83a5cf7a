"""Find layouts that fit a cluster, and how long a step takes; no GPU needed.

  vapo plan --model Qwen2.5-32B --gpus 128 --gpu-memory 80GB
  vapo plan --model Qwen2.5-32B --gpus 128 --config run.yaml --tp 8
  vapo plan --model Qwen2.5-32B --gpus 128 --placement disaggregated --lag 1
  vapo plan --model Qwen2.5-32B --gpus 8 model.lora.rank=32
  vapo plan reshard --model Qwen2.5-32B --tp 8 --pp 4 --vllm-tp 8      the cost of a weight sync

Layouts that fit are ranked by seconds per step. The best one is shown in detail, with YAML to paste
into a configuration. Nothing is measured: bytes and seconds follow from the model's sizes and the
GPU's data sheet. The exit code is 2 if nothing fits.

With --placement disaggregated the search also covers the split of the GPUs into trainers and
rollout workers, and the best plan is compared with the best colocated one.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence

from vapo_megatron.cli.command import Parser, run
from vapo_megatron.cli.plan_options import add_plan, add_reshard
from vapo_megatron.config import ParallelConfig, VapoConfig, load_config
from vapo_megatron.errors import ConfigError, UserError
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.models.known import shape_of
from vapo_megatron.models.layout_rules import check_layout
from vapo_megatron.planning import describe
from vapo_megatron.planning import reshard as cost
from vapo_megatron.planning.cluster import GB, GPUS, Cluster
from vapo_megatron.planning.notes import not_modelled
from vapo_megatron.planning.parameters import adapters_of
from vapo_megatron.planning.plan import Plan, resharding_seconds
from vapo_megatron.planning.ranking import Fixed, Ranking, rank
from vapo_megatron.planning.splits import rank_splits
from vapo_megatron.planning.workload import Workload, workload_of
from vapo_megatron.weights.holders import layout_of
from vapo_megatron.weights.reshard.planner import make_plan
from vapo_megatron.weights.table import parameter_count

RESHARD = """Compare the bytes and seconds of a weight sync with a gather of full tensors.

  vapo plan reshard --model Qwen2.5-32B --tp 8 --pp 4 --vllm-tp 8

The plan sends each vLLM rank the slices that it is missing. A full gather brings every tensor to
every rank first.
"""
_MOST_GPUS = 1_000_000
"""Of more, the rounds of generation alone take minutes to count: one replica after another."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan. Return 0; 2 for a user's mistake, or if nothing fits; 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def work() -> None:
        if arguments[:1] == ["reshard"]:
            usage = "vapo plan reshard --model MODEL --tp N --pp N --vllm-tp N [options]"
            parser = Parser(prog="vapo plan reshard", usage=usage, description=RESHARD)
            add_reshard(parser)
            _print(reshard(parser.parse_args(arguments[1:])))
            return
        usage = (
            "vapo plan --model MODEL --gpus N [options] [section.field=value ...] | "
            "vapo plan reshard --help"
        )
        parser = Parser(prog="vapo plan", usage=usage, description=__doc__)
        add_plan(parser)
        # Overrides may stand before, between and after options, as those of a run.
        text, refusal = plan(parser.parse_intermixed_args(arguments))
        _print(text)
        if refusal is not None:
            raise UserError(refusal)

    return run("plan", work, interrupted="nothing was written")


def _print(text: str) -> None:
    """Print; a reader that stops early, such as head, ends this process without an error."""
    earlier = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(text, flush=True)
    signal.signal(signal.SIGPIPE, earlier)


def plan(options: argparse.Namespace) -> tuple[str, str | None]:
    """Return the ranked layouts, the first in detail, and why nothing fits, if nothing does."""
    shape, cluster, workload, ranking = ranked(options)
    table = describe.describe_ranking(ranking, options.top)
    job = describe.describe_job(options.model, shape, cluster, workload)
    if not ranking.plans:
        closest, refusal = describe.describe_misfit(shape, ranking, cluster)
        return f"{job}\n\n{table}\n\n{closest}", refusal
    details = [
        describe.describe_plan(
            shape, one, resharding_seconds(shape, one) if one.config.samples else None
        )
        for one in ranking.plans[: options.details]
    ]
    best = ranking.plans[0]
    if best.config.rollout.is_disaggregated or best.config.rollout.carry_over_groups:
        details.append(describe.describe_gain(best, best_colocated(options, shape, best)))
    pasted = "to paste:\n" + describe.to_paste(best.config).rstrip()
    notes = not_modelled(best.config)
    return "\n\n".join([job, table, *details, pasted, notes]), None


def best_colocated(options: argparse.Namespace, shape: ModelShape, best: Plan) -> Plan | None:
    """Return the fastest colocated plan of the same job, with the same settings fixed."""
    base = base_config(options).colocated()
    fixed = fixed_settings(options)._replace(samplers=None)
    try:
        plans = rank(shape, base, best.cluster, best.workload, fixed).plans
    except ConfigError:  # a size of vLLM that divides the rollout workers, but not all GPUs
        return None
    return plans[0] if plans else None


def ranked(options: argparse.Namespace) -> tuple[ModelShape, Cluster, Workload, Ranking]:
    """Return what the options describe, and its layouts, ranked."""
    shape, cluster = shape_of(options.model, "--model"), cluster_of(options)
    base = base_config(options)
    adapters_of(shape, base, "actor")
    workload = workload_of(
        base,
        mean_response_tokens=options.response,
        prompt_tokens=options.prompt,
        spread=options.spread,
        turns=options.turns,
        observation_tokens=options.observations,
    )
    search = rank_splits if base.rollout.is_disaggregated else rank
    return shape, cluster, workload, search(shape, base, cluster, workload, fixed_settings(options))


def fixed_settings(options: argparse.Namespace) -> Fixed:
    """Return what the options fix."""
    fixed = Fixed(**{name: getattr(options, name) for name in Fixed._fields})
    if options.recompute_layers is not None and options.recompute not in (None, "full"):
        raise ConfigError(
            f"--recompute-layers={options.recompute_layers} needs --recompute=full, found "
            f"{options.recompute}; change it"
        )
    if options.offload is not None:
        fixed = fixed._replace(offload=options.offload == "yes")
    return fixed


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Return the cluster; what is not given comes from the GPU's data sheet.

    Raises:
        ConfigError: nodes would have different sizes, or the number of GPUs is mistyped.
    """
    if options.gpus > _MOST_GPUS:
        raise ConfigError(f"--gpus={options.gpus} must be at most {_MOST_GPUS}; correct it")
    per_node = min(options.gpus_per_node, options.gpus)
    if options.gpus % per_node:
        raise ConfigError(
            f"--gpus={options.gpus} must be a multiple of --gpus-per-node={per_node}; change one"
        )
    given = {
        "gpu_bytes": options.gpu_memory,
        "peak_tflops": options.tflops,
        "memory_gb_per_second": options.hbm,
        "nvlink_gb_per_second": options.nvlink,
        "network_gb_per_second": options.network,
        "pcie_gb_per_second": options.pcie,
    }
    fields = GPUS[options.gpu] | {name: value for name, value in given.items() if value is not None}
    return Cluster(
        num_gpus=options.gpus,
        gpus_per_node=per_node,
        storage_gb_per_second=options.storage,
        **{**fields, **dict(options.share)},
    )


def base_config(options: argparse.Namespace) -> VapoConfig:
    """Return the run's configuration with the number of GPUs, and no layout yet.

    Raises:
        ConfigError: an override says what is searched, or what an option says.
    """
    fields = {
        # Which layouts the number of GPUs allows is checked for each of them.
        "parallel.world_size": 1,
        "parallel.tensor_model_parallel_size": 1,
        "parallel.context_parallel_size": 1,
        "parallel.pipeline_model_parallel_size": 1,
        "parallel.virtual_pipeline_model_parallel_size": "null",
        "parallel.sequence_parallel": "false",
        "parallel.expert_model_parallel_size": 1,
        "parallel.recompute_method": "uniform",
        "parallel.recompute_num_layers": 1,
        "rollout.kv_cache_dtype": options.kv_cache_dtype,
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
    fields |= placement_fields(options)
    if options.no_critic:
        fields |= {"algorithm.advantage_estimator": "grpo", "algorithm.value_pretraining_steps": 0}
    if options.reference:
        fields["algorithm.kl_coef"] = 0.001  # any value above 0: the plan is the same
    if options.reward_model:
        fields |= {"model.reward_hf_path": options.reward_model}
    given = [f"{name}={value}" for name, value in fields.items() if value is not None]
    for override in options.overrides:
        if override.partition("=")[0] in [one.partition("=")[0] for one in given]:
            raise ConfigError(
                f"{override} is searched over, or set by an option; leave it out, and use the "
                "option (--help lists them)"
            )
    config = load_config(options.config, [*options.overrides, *given])
    parallel = config.parallel.model_copy(update={"world_size": options.gpus})
    return config.model_copy(update={"parallel": parallel})


def placement_fields(options: argparse.Namespace) -> dict[str, object]:
    """Return what the options say of placement; the split is searched, so a file's is ignored."""
    processes = {"colocated": 0, "disaggregated": 1}.get(options.placement)
    lag = 0 if options.placement == "colocated" else None
    return {
        "rollout.placement": options.placement,
        "rollout.num_processes": processes if options.samplers is None else options.samplers,
        "rollout.lag": lag if options.lag is None else options.lag,
        "rollout.carry_over_groups": options.carry_over,
        "rollout.max_lag": options.max_lag,
        "rollout.max_logprob_difference": "null" if options.lag or options.carry_over else None,
    }


def reshard(options: argparse.Namespace) -> str:
    """Return a table of what RESHARD compares; the layout is checked as a run would."""
    shape, world_size = shape_of(options.model, "--model"), options.nodes * options.gpus_per_node
    parallel = ParallelConfig(
        world_size=world_size,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        virtual_pipeline_model_parallel_size=options.vpp if options.vpp > 1 else None,
        sequence_parallel=options.tp > 1,
        expert_model_parallel_size=options.ep,
    )
    check_layout(shape, parallel)
    if options.vpp > 1 and options.pp == 1:
        raise ConfigError(f"--vpp={options.vpp} must be 1 with --pp=1: chunks divide a pipeline")
    if world_size % (options.tp * options.pp):
        raise ConfigError(
            f"--nodes={options.nodes} * --gpus-per-node={options.gpus_per_node} must be a multiple "
            f"of --tp={options.tp} * --pp={options.pp}; change one of them"
        )

    dp_size = parallel.data_parallel_size
    trainer = layout_of(shape, parallel)
    cluster = Cluster(
        num_gpus=world_size,
        gpus_per_node=options.gpus_per_node,
        nvlink_gb_per_second=options.nvlink,
        network_gb_per_second=options.network,
    ).at_peak()

    # Planning is timed, because every rank of a run does it at start.
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

"""The plan of a configuration as it is, which --dry-run appends; and where a model's sizes are."""

from __future__ import annotations

from pathlib import Path

from vapo_megatron.config import VapoConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.hf_config import ModelShape, check_layout, read_model_shape
from vapo_megatron.models.known import KNOWN_MODELS, known_shape
from vapo_megatron.planning import describe
from vapo_megatron.planning.cluster import GB, Cluster
from vapo_megatron.planning.plan import host_misfit, make_plan, misfit
from vapo_megatron.planning.workload import workload_of


def planned(config: VapoConfig, shape: ModelShape) -> str:
    """Plan a configuration as it is, on H100s of parallel.gpu_memory_gb, for people.

    Raises:
        ConfigError: the layout does not divide the model.
    """
    check_layout(shape, config.parallel)
    num_gpus = config.parallel.world_size
    cluster = Cluster(
        num_gpus=num_gpus,
        gpus_per_node=min(8, num_gpus),
        gpu_bytes=int(config.parallel.gpu_memory_gb * GB),
    )
    workload = workload_of(config)
    plan = make_plan(shape, config, cluster, workload)
    reason = misfit(shape, config, cluster.gpu_bytes, plan.memory) or host_misfit(
        shape, config, cluster.gpus_per_node
    )
    verdict = f"DOES NOT FIT: {reason}" if reason else "fits"
    return "\n".join(
        [
            describe.describe_job(str(config.model.hf_path), shape, cluster, workload),
            verdict,
            "",
            describe.describe_plan(shape, plan),
            "",
            describe.describe_notes(),
        ]
    )


def dry_run_comment(config: VapoConfig) -> str:
    """Return planned() as YAML comments, or one that says why there is no plan."""
    try:
        if config.model.hf_path is None:
            raise ConfigError("model.hf_path is not set")
        text = planned(config, shape_of(config.model.hf_path))
    except ConfigError as error:
        text = f"no plan could be made: {error} (tools/plan.py knows published models without)"
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def shape_of(model: str) -> ModelShape:
    """Read a directory or its config.json; what is not here is the published model of its name."""
    path = Path(model)
    path = path.parent if path.name == "config.json" else path
    if path.exists():
        return read_model_shape(path)
    if path.name in KNOWN_MODELS or "/" not in model:
        return known_shape(path.name)
    return read_model_shape(path)

"""What a plan says beside its tables: adapters, and what it leaves out."""

from __future__ import annotations

from vapo_megatron.config import VapoConfig
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.planning.cluster import GB
from vapo_megatron.planning.model_bytes import Layout, base_bytes
from vapo_megatron.planning.parameters import adapters_of, own_rows
from vapo_megatron.weights.table import parameter_count

NOT_MODELLED = """\
not modelled:
  - inefficient kernel shapes, launch overhead and stragglers: seconds are a roofline estimate, \
and published jobs lie within the range (docs/planning.md)
  - pipeline stages that wait for each other because microbatches differ in length
  - preemption in vLLM; actual response lengths (assumed log-normal with the given mean)
  - a critic's frozen attention: its backward pass and saved inputs are counted as if trained
  - groups that go on in the next step: a step is planned as if it waited for all its responses
  - extra rounds of dynamic sampling: a step samples its responses once
  - FP8 compute and saved inputs: counted as bfloat16 (the weights' FP8 copies are counted)
  - a reward model beside other verifiers: counted as if it scored every response
  - verifier, exchange of responses, advantages, evaluation, startup
  - contention between nodes in a weight sync, and between GPUs for host memory"""

NOT_MODELLED_ADAPTERS = """
  - what the host takes to start the adapters' kernels, which delays models that wait for it"""


def not_modelled(config: VapoConfig) -> str:
    """Return the list of what a plan leaves out."""
    return NOT_MODELLED + (NOT_MODELLED_ADAPTERS if config.model.lora.rank is not None else "")


def describe_adapters(shape: ModelShape, config: VapoConfig) -> list[str]:
    """Return lines: what is trained in place of the weights, and what is frozen below; or none."""
    lora, found = config.model.lora, []
    for role in config.algorithm.trained_roles:
        adapters = adapters_of(shape, config, role)
        if adapters is None:
            continue
        rows = own_rows(shape, config, role)
        count = sum(row.elements(shape) * row.count(shape) for row in rows)
        whole = parameter_count(shape, value_head=role == "critic")
        head = " and a value head" if role == "critic" else ""
        found.append(
            f"  {role}: adapters of rank {adapters.rank}{head}, {count / 1e6:.1f}e6 parameters "
            f"({count / whole:.1%} of the model's), are trained"
        )
    stages = Layout(shape, config).outer_stages
    size = max(base_bytes(shape, config, "actor", pp_rank=stage) for stage in stages)
    sharing = ["actor", *(role for role in config.algorithm.roles if lora.shares(role))]
    if size and len(sharing) > 1:
        found.append(f"  base: one copy of {size / GB:.1f} GB on each GPU, of {', '.join(sharing)}")
    return found

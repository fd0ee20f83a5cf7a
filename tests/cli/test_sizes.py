"""What a model's sizes decide before a start: settings of experts, with and without them."""

import pytest

from vapo_megatron.cli.checks.sizes import check_sizes
from vapo_megatron.config import load_config
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.known import known_shape

DENSE, MIXTURE = known_shape("Qwen3-8B"), known_shape("Qwen3-30B-A3B")
ONLY_WITH_EXPERTS = (
    "model.freeze_router=true", "algorithm.router_replay=r2", "rollout.expert_parallel=true",
    "parallel.expert_model_parallel_size=2",
)  # fmt: skip


def config(*overrides):
    given = ["parallel.world_size=8", "model.hf_path=models/here", *overrides]
    return load_config([], given)


@pytest.mark.parametrize("override", ONLY_WITH_EXPERTS)
def test_experts_are_asked_for_where_there_are_none(override):
    check_sizes(config(override), MIXTURE)
    with pytest.raises(ConfigError, match=f"{override} needs a model with experts.* set it to"):
        check_sizes(config(override), DENSE)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("method", ["dion", "muon"])
def test_matrices_of_experts_have_adamw(role, method):
    check_sizes(config(f"optimizer.{role}_method={method}"), DENSE)
    with pytest.raises(ConfigError, match=f"optimizer.{role}_method={method} must be adamw"):
        check_sizes(config(f"optimizer.{role}_method={method}"), MIXTURE)

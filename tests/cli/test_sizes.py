"""What a model's sizes decide before a start: settings of experts, with and without them."""

import dataclasses

import pytest

from vapo_megatron.cli.checks.sizes import check_sizes
from vapo_megatron.config import load_config
from vapo_megatron.errors import ConfigError
from vapo_megatron.models.known import known_shape

DENSE, MIXTURE = known_shape("Qwen3-8B"), known_shape("Qwen3-30B-A3B")
ONLY_WITH_EXPERTS = (
    "model.freeze_router=true", "algorithm.router_replay=r2", "algorithm.router_replay=r3",
    "rollout.expert_parallel=true", "parallel.expert_model_parallel_size=2",
)  # fmt: skip


def config(*overrides):
    given = ["parallel.world_size=8", "model.hf_path=models/here", *overrides]
    return load_config([], given)


@pytest.mark.parametrize("override", ONLY_WITH_EXPERTS)
def test_experts_are_asked_for_where_there_are_none(override):
    check_sizes(config(override), MIXTURE)
    with pytest.raises(ConfigError, match=f"{override} needs a model with experts.* set it to"):
        check_sizes(config(override), DENSE)


def test_a_byte_holds_the_number_of_an_expert_or_of_none():
    def shape(count):
        experts = dataclasses.replace(MIXTURE.experts, count=count)
        return dataclasses.replace(MIXTURE, experts=experts)

    check_sizes(config("algorithm.router_replay=r3"), shape(255))
    check_sizes(config("algorithm.router_replay=r2"), shape(256))
    with pytest.raises(ConfigError, match="router_replay=r3 keeps a byte .* 255; .* has 256; set"):
        check_sizes(config("algorithm.router_replay=r3"), shape(256))


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("method", ["dion", "muon"])
def test_matrices_of_experts_have_adamw(role, method):
    check_sizes(config(f"optimizer.{role}_method={method}"), DENSE)
    with pytest.raises(ConfigError, match=f"optimizer.{role}_method={method} must be adamw"):
        check_sizes(config(f"optimizer.{role}_method={method}"), MIXTURE)

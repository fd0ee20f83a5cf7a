"""What is refused of samplers in processes of their own, before a run starts."""

import pytest

from vapo_megatron.config import load_config
from vapo_megatron.errors import ConfigError

APART = ["rollout.placement=disaggregated", "rollout.num_processes=2"]
REFUSED = [
    (["rollout.num_processes=1"], "num_processes=1 needs rollout.placement=disaggregated, found"),
    (["rollout.lag=2"], "rollout.lag=2 needs rollout.placement=disaggregated, found colocated"),
    (APART[:1], "needs rollout.num_processes of at least 1, found 0; set how many"),
    (
        [*APART, "rollout.tensor_model_parallel_size=4"],
        "rollout.num_processes=2 must be divisible by rollout.tensor_model_parallel_size=4",
    ),
    ([*APART, "algorithm.dynamic_sampling=true"], "dynamic_sampling=true, whose rounds depend on"),
    ([*APART, "model.reward_hf_path=rm"], "model.reward_hf_path=rm: samplers keep responses with"),
    (
        [*APART, "rollout.lag=1", "rollout.max_logprob_difference=0.1"],
        "rollout.lag=1 must not be combined with rollout.max_logprob_difference=0.1: with a lag",
    ),
    (
        ["rollout.behaviour=sampler", "algorithm.sampler_correction=tis"],
        "behaviour=sampler must not be combined with algorithm.sampler_correction=tis, which",
    ),
    (["rollout.lag=-1"], "rollout.lag"),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED)
def test_what_does_not_fit_together_is_refused_with_a_remedy(overrides, words):
    with pytest.raises(ConfigError) as caught:
        load_config([], overrides)
    assert words in str(caught.value)


def test_the_processes_of_both_sides_are_started_and_the_trainers_layout_is_theirs():
    layout = ["parallel.world_size=4", "parallel.tensor_model_parallel_size=2"]
    config = load_config(
        [], [*layout, *APART, "rollout.lag=3", "rollout.tensor_model_parallel_size=2"]
    )
    assert config.num_processes == 6 and config.parallel.data_parallel_size == 2
    together = config.colocated()
    assert together.num_processes == 4 and together.rollout.lag == 0
    assert load_config([], layout).num_processes == 4

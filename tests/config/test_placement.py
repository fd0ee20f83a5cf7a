"""What is refused of where and when responses are sampled, before a run starts."""

import pytest

from vapo_megatron.config import load_config
from vapo_megatron.errors import ConfigError

APART = ["rollout.placement=disaggregated", "rollout.num_processes=2"]
STEP = ["algorithm.responses_per_step=32", "algorithm.group_size=16"]
CARRIES = [*STEP, "algorithm.mini_batch_size=32", "rollout.carry_over_groups=2"]
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
    (
        [*STEP, "rollout.carry_over_groups=3"],
        "rollout.carry_over_groups=3 must not exceed the groups of a step, responses_per_step / "
        "group_size = 2: more could",
    ),
    ([*CARRIES, "algorithm.dynamic_sampling=true"], "dynamic_sampling=true, whose rounds depend"),
    ([*CARRIES, "model.reward_hf_path=rm"], "model.reward_hf_path=rm: groups wait with their"),
    (
        [*CARRIES, "rollout.max_logprob_difference=0.1"],
        "carry_over_groups=2 must not be combined with rollout.max_logprob_difference=0.1: older",
    ),
    (["rollout.max_lag=0"], "rollout.max_lag"),
    (
        ["rollout.carried_cache=keep"],
        "rollout.carried_cache is no longer a field: groups that go on are always recomputed",
    ),
    (
        [*CARRIES, "rollout.shared_queue=true"],
        "shared_queue=true must not be combined with rollout.carry_over_groups=2, which cuts",
    ),
    (
        [*STEP, "rollout.shared_queue=true", "rollout.max_num_sequences=8"],
        "needs rollout.max_num_sequences=8 of at least algorithm.group_size=16: engines take whole",
    ),
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


def test_tokens_may_be_older_than_a_step_with_either():
    assert not load_config([], []).rollout.is_stale
    config = load_config([], CARRIES)
    assert config.rollout.is_stale and not config.colocated().rollout.is_stale
    assert load_config([], [*APART, "rollout.lag=1"]).rollout.is_stale


def test_a_removed_field_is_accepted_where_it_changes_nothing():
    """Every run's config.yaml by an earlier version names it."""
    assert load_config([], ["rollout.carried_cache=recompute"]) == load_config([])

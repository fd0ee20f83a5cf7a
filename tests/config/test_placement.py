"""What is refused of where and when responses are sampled, before a run starts."""

from vapo_megatron.config import load_config

APART = ["rollout.placement=disaggregated", "rollout.num_processes=2"]
STEP = ["algorithm.responses_per_step=32", "algorithm.group_size=16"]
CARRIES = [*STEP, "algorithm.mini_batch_size=32", "rollout.carry_over_groups=2"]


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

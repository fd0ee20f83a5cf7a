"""Host memory of what router replay remembers, which tests/distributed/test_experts.py measures."""

from vapo_megatron.config import VapoConfig
from vapo_megatron.models.known import known_shape
from vapo_megatron.planning.host_memory import host_bytes, route_bytes


def test_routes_of_a_step_by_hand():
    shape = known_shape("Qwen3-30B-A3B")
    tree = {
        "algorithm": {"responses_per_step": 64, "group_size": 8, "mini_batch_size": 32},
        "rollout": {"max_prompt_tokens": 100, "max_response_tokens": 900},
    }

    def config(replay="r2", **parallel):
        algorithm = {**tree["algorithm"], "router_replay": replay}
        parallel = {"world_size": 8, **parallel}
        return VapoConfig.model_validate({**tree, "algorithm": algorithm, "parallel": parallel})

    # 8 responses of 1,000 tokens, 8 experts in each of 48 layers.
    assert route_bytes(shape, config()) == 8 * 1000 * 48 * 8
    halved = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    # Twice the responses, half of each sequence.
    assert route_bytes(shape, config(**halved)) == 8 * 1000 * 48 * 8
    assert route_bytes(shape, config(pipeline_model_parallel_size=2)) == 16 * 1000 * 24 * 8
    assert route_bytes(shape, config(replay="off")) == 0
    more = host_bytes(
        shape, config(), pp_rank=0, is_first_replica=True, is_offloaded=True, keeps_rollouts=True
    )
    less = host_bytes(
        shape, config(replay="off"), pp_rank=0, is_first_replica=True, is_offloaded=True,
        keeps_rollouts=True,
    )  # fmt: skip
    assert more.step - less.step == 8 * 1000 * 48 * 8

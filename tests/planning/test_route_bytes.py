"""Host memory of what router replay remembers, which tests/distributed/test_experts.py measures."""

from vapo_megatron.config import VapoConfig
from vapo_megatron.models.known import known_shape
from vapo_megatron.planning.host_memory import host_bytes, rollout_host_bytes, route_bytes


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


def test_the_samplers_routes_by_hand():
    shape = known_shape("Qwen3-30B-A3B")

    def config(replay="r3", algorithm=(), rollout=(), **parallel):
        lengths = {"max_prompt_tokens": 100, "max_response_tokens": 900}
        sizes = {"responses_per_step": 64, "group_size": 8, "mini_batch_size": 32}
        return VapoConfig.model_validate({
            "algorithm": {**sizes, "router_replay": replay, **dict(algorithm)},
            "rollout": {**lengths, **dict(rollout)},
            "parallel": {"world_size": 8, **parallel},
        })  # fmt: skip

    def step(config, *, keeps):
        found = host_bytes(
            shape, config, pp_rank=0, is_first_replica=True, is_offloaded=True, keeps_rollouts=keeps
        )
        return found.step

    # Of 1,000 tokens in each of 48 layers.
    response = 1000 * 48 * 8
    # The arrived ones and those of the passes: without TP or CP these are the same tokens.
    assert route_bytes(shape, config()) == 2 * 8 * response
    halved = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert route_bytes(shape, config(**halved)) == (16 + 8) * response
    # And what a replica of its own has sampled, of all layers.
    for keeps, sampled in ((True, 8), (False, 0)):
        more = step(config(), keeps=keeps) - step(config("off"), keeps=keeps)
        assert more == (2 * 8 + sampled) * response
    halves = {"pipeline_model_parallel_size": 2}
    assert step(config(**halves), keeps=True) - step(config("off", **halves), keeps=True) == (
        2 * 16 * response // 2 + 8 * response
    )
    apart = {"placement": "disaggregated", "num_processes": 4, "lag": 1}
    more, less = (
        rollout_host_bytes(shape, config(mode, rollout=apart), 4).step for mode in ("r3", "off")
    )
    # Four replicas have the responses of two steps.
    assert more - less == 2 * 64 * response

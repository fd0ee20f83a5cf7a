"""Host memory of groups in flight and of steps that are sampled ahead, by hand."""

from unittest import mock

import pytest

from tests import dumped
from tests.planning.shapes import small_shape
from vapo_megatron.planning.host_memory import (
    host_bytes,
    host_bytes_per_node,
    rollout_host_bytes,
    step_host_bytes,
)

RESPONSE, GROUPS, GROUP = 300, 3, dumped.GROUP_SIZE
TOKEN = 12  # id, log-probability, text
SHAPE = small_shape(hidden=64, layers=2, heads=2, kv_heads=2, head=32, ffn=48, vocab=60)
APART = {"placement": "disaggregated", "num_processes": 2}


def config(world_size=2, **rollout):
    return dumped.config(
        "hf",
        parallel={"world_size": world_size},
        rollout={
            "max_prompt_tokens": 31, "max_response_tokens": RESPONSE,
            "max_logprob_difference": None, **rollout,
        },
    )  # fmt: skip


@pytest.fixture(autouse=True)
def of_finished_responses_alone():
    with mock.patch("vapo_megatron.planning.host_memory.VLLM_HOST_TOKEN_BYTES", 1):
        yield


def test_groups_in_flight_of_trainers_that_sample():
    """Three groups on two replicas: the plan counts two on each, as the replica with most has."""
    plain, carries = config(), config(carry_over_groups=GROUPS)
    more = TOKEN * 2 * GROUP * RESPONSE

    def of_process(config):
        return host_bytes(
            SHAPE, config, pp_rank=0, is_first_replica=True, is_offloaded=False, keeps_rollouts=True
        ).step

    def of_node(config):
        return host_bytes_per_node(SHAPE, config, gpus_per_node=8).step

    assert step_host_bytes(carries, keeps_rollouts=True) - more == step_host_bytes(
        plain, keeps_rollouts=True
    )
    assert of_process(carries) - of_process(plain) == more
    assert of_node(carries) - of_node(plain) == 2 * more


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_groups_in_flight_and_steps_ahead_of_rollout_workers(lag):
    """Of 16 responses each of two has 8 for each of lag + 1 steps, and two groups of 4."""
    plain, carries = (config(**APART, lag=lag, carry_over_groups=n) for n in (0, GROUPS))
    for count in (1, 2):
        running = count * 8 * RESPONSE
        ahead = count * TOKEN * (lag + 1) * 8 * RESPONSE
        assert rollout_host_bytes(SHAPE, plain, count).step == running + ahead
        more = count * TOKEN * 2 * GROUP * RESPONSE
        assert rollout_host_bytes(SHAPE, carries, count).step == running + ahead + more
    nodes = [host_bytes_per_node(SHAPE, c, gpus_per_node=2).step for c in (plain, carries)]
    alone = [step_host_bytes(c, keeps_rollouts=True) for c in (plain, carries)]
    assert alone[0] == alone[1], "trainers have none of them"
    ours = [rollout_host_bytes(SHAPE, c, 2).step for c in (plain, carries)]
    assert nodes == [max(own, 2 * alone[0]) for own in ours]

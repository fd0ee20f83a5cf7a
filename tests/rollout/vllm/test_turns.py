"""Episodes in real vLLM engines: the tokens are those of turns that are sent one by one.

Two gloo processes are two replicas, then one replica with TP 2, in float32 on a tiny Qwen2. Not
exercised: GPUs.
"""

import pytest

from tests.rollout.vllm import turn_jobs as jobs
from tests.rollout.vllm.test_engine import TINY
from tests.weights.tiny_hf import write_tiny_model

DELAYS = ("up to 0.0 s", "up to 0.03 s", "up to 0.1 s", "up to 0.3 s")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), **TINY)


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="two replicas"), pytest.param(2, marks=pytest.mark.slow, id="TP 2")],
)
def found(request, vllm_workers, model, tmp_path_factory):
    """What each rank found."""
    tmp = tmp_path_factory.mktemp("run")
    return vllm_workers.run(2, jobs.episodes, tmp, model, request.param, timeout_seconds=280)


def test_episodes_are_those_of_turns_one_by_one(found):
    plain = found[0]["plain"]
    assert len(plain) == jobs.COUNT and found[1]["plain"] == plain
    for case in DELAYS:
        played = {**found[0][case][0], **found[1][case][0]}
        assert played.keys() == plain.keys(), case
        for position, rollout in played.items():
            other = plain[position]
            assert rollout.token_ids == other.token_ids, (case, position)
            assert list(rollout.logprobs) == pytest.approx(list(other.logprobs), abs=1e-5)
            assert rollout.inserted == other.inserted and rollout.turns == other.turns


def test_they_end_in_every_way(found):
    played = found[0]["plain"].values()
    ways = [(len(r.turns), r.truncated) for r in played]
    assert {turns for turns, _ in ways} == {1, 2, 3, 4}
    assert {cut for _, cut in ways} == {False, True}
    longer = {r.prompt.token_ids[-1] == 20 + r.position % 3 - 1 for r in played if r.position % 3}
    assert longer == {True}, "with what the environment says first"
    assert max(r.num_inserted + len(r.token_ids) for r in played) <= jobs.MAX_TOKENS


def test_answers_come_in_other_orders(found):
    orders = [tuple(found[0][case][1]) for case in DELAYS]
    assert len(set(orders)) == len(DELAYS) and len({frozenset(o) for o in orders}) == 1

"""Responses that a real vLLM engine begins, that are cut, and that go on; beside transformers.

One process and a tiny Qwen2 in float32. Not exercised: GPUs, sharded engines.
"""

import pytest

from tests.rollout.vllm import partial_jobs as jobs
from tests.rollout.vllm.engine_jobs import settings
from tests.rollout.vllm.test_engine import assert_greedy, assert_logprobs, make_models, reference
from vapo_megatron.rollout.requests import continued_seed

__all__ = ["reference"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"), first={}, second={"seed": 1})


@pytest.fixture(scope="module")
def found(vllm_workers, models, tmp_path_factory):
    tmp = tmp_path_factory.mktemp("run")
    (result,) = vllm_workers.run(
        1, jobs.cut_and_gone_on, tmp, models["first"], models["second"], timeout_seconds=280
    )
    return result


def test_what_is_not_cut_is_as_without(found):
    whole, cut = found["uncut"]
    assert (whole, cut) == (found["plain"], [])
    whole, cut = found["by count"]
    assert len(whole) >= jobs.WHOLE and whole and cut
    assert whole == [r for r in found["plain"] if r.position in {w.position for w in whole}]
    assert found["again"] == found["by count"], "where it is cut does not depend on time"


def test_a_response_is_cut_between_two_tokens(found):
    """Fewer run at once than there are, so that some have not begun."""
    plain = {r.position: r for r in found["plain"]}
    early, cut = found["by tokens"]
    assert sorted(r.position for r in [*early, *cut]) == list(range(jobs.COUNT))
    lengths = [len(r.token_ids) for r in cut]
    assert max(lengths) == jobs.CUT_AT and min(lengths) < jobs.CUT_AT
    for r in cut:
        count = len(r.token_ids)
        assert len(r.logprobs) == count and not r.truncated and r.segments == ()
        assert r.token_ids == plain[r.position].token_ids[:count]
        assert r.logprobs == plain[r.position].logprobs[:count]


def test_it_goes_on_with_the_log_probabilities_of_the_whole_text(found, reference):
    _, cut = found["by tokens"]
    whole, rest = found["same weights"]
    assert rest == [] and not found["left"]
    for before, after in zip(sorted(cut, key=lambda r: r.position), whole, strict=True):
        count = len(before.token_ids)
        assert after.token_ids[:count] == before.token_ids
        assert after.logprobs[:count] == before.logprobs
        assert count < len(after.token_ids) <= settings().max_response_tokens
        assert after.versions == ((3, len(after.token_ids)),)
        assert_logprobs(after, reference["first"], 0, None)
    # Its random numbers are not those of its beginning once more.
    assert found["seeds"] == [12, continued_seed(12, 7)] and found["seeds"][1] != 12
    begun = [(len(b.token_ids), a.token_ids) for b, a in zip(cut, whole) if len(b.token_ids)]
    assert any(ids[n : 2 * n] != ids[: len(ids[n : 2 * n])] for n, ids in begun)


def test_each_token_has_the_version_and_log_probability_that_it_was_sampled_with(found, reference):
    _, cut = found["by tokens"]
    whole, rest = found["other weights"]
    assert rest == []
    for before, after in zip(sorted(cut, key=lambda r: r.position), whole, strict=True):
        count, total = len(before.token_ids), len(after.token_ids)
        expected = ((3, count), (4, total - count)) if count else ((4, total),)
        assert after.versions == expected and after.policy_version == 4
        assert_logprobs(after, reference["first"], 0, count)
        assert_logprobs(after, reference["second"], count, None)


def test_nothing_of_older_weights_is_left(found, reference):
    before, after = found["cached"]
    assert before > 0 and after == 0
    assert_greedy(reference["second"], found["evaluation"])
    assert found["older version"].startswith("RuntimeError: asked for policy version 3, but the")

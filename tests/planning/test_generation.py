"""Seconds of sampling by hand, and what a step has to do.

Whether a GPU reaches what its data sheet says, and what share of it, is not a test's to say.
"""

import dataclasses

import numpy as np
import pytest

from tests.planning.by_hand import OUTPUT, PAIR, ROUND, SHAPE, TOKEN, WORKLOAD, config
from vapo_megatron.config import VapoConfig
from vapo_megatron.planning.generation import _decode, _Rank, generation
from vapo_megatron.planning.workload import Loads, loads, response_lengths, workload_of


def test_decoding_by_hand():
    rank = _Rank(
        weight_seconds=10.0,
        token_seconds=0.0,
        cached_seconds=1.0,
        sequence_seconds=0.0,
        step_seconds=0.0,
    )
    # Prompts of 2, responses of 1 and 3. Together: the first step reads 3 + 3 tokens, 16 s; then
    # one is left with 4 and 5 tokens: 14 + 15 s.
    assert _decode(rank, np.array([1, 3]), 2, 2) == (45.0, 0.0)
    # One after the other: 13, then 13 + 14 + 15.
    assert _decode(rank, np.array([1, 3]), 2, 1) == (55.0, 0.0)
    # A batch of 4: both steps with one of them are less than half.
    assert _decode(rank, np.array([1, 3]), 2, 4) == (45.0, 29.0)


def test_decoding_is_bound_by_products_when_there_are_many():
    rank = _Rank(1.0, 0.5, 0.0, 0.25, 3.0)
    # 4 sequences: max(1, 2) + 1 + 3 a step.
    assert _decode(rank, np.array([5, 5, 5, 5]), 1, 4)[0] == pytest.approx(5 * 6.0)


def test_generation_by_hand():
    shape = dataclasses.replace(SHAPE, tied=True)
    workload = dataclasses.replace(WORKLOAD, num_responses=2, mini_batch_size=2)
    found = generation(shape, config(1), dataclasses.replace(ROUND, num_gpus=1), workload, 10**6)
    # Weights that are read, tied: 64 * 4 embedding rows and columns, 4 layers of 124 + 12 + 8,
    # 4 of the last norm: 836, 2 bytes each. Cache: 2 * 4 layers * 4 * 2 = 64 bytes a token; two
    # sequences of 3, ..., 8 tokens: 66. 6 steps.
    decode = 6 * 836 * 2e-9 + 66 * 64e-9
    # Prompt, once for both: 4 layers of 2 tokens and 3 pairs, one output.
    prefill = 4 * (2 * TOKEN + 3 * PAIR) + OUTPUT
    assert found.prefill_seconds == pytest.approx(prefill)
    assert found.seconds == pytest.approx(decode + prefill) and found.batch == 256
    # Untied, of 64 * 4 embedding elements more only the sampled tokens' rows are read.
    untied = generation(SHAPE, config(1), dataclasses.replace(ROUND, num_gpus=1), workload, 10**6)
    assert untied.seconds == pytest.approx(found.seconds)


def test_a_small_cache_samples_fewer_at_once():
    # A running sequence has 2 + 36 / 12 = 5 tokens on average.
    found = generation(SHAPE, config(1), ROUND, WORKLOAD, 17)
    assert found.batch == 3
    assert generation(SHAPE, config(1), ROUND, WORKLOAD, 4).batch == 1


def test_lengths_have_the_mean_and_the_maximum():
    workload = dataclasses.replace(
        WORKLOAD, num_responses=2048, mean_response_tokens=3100, max_response_tokens=3840
    )
    lengths = response_lengths(workload)
    assert lengths.mean() == pytest.approx(3100, abs=1)
    assert lengths.max() == 3840 and lengths.min() >= 1
    assert 400 < lengths.std() < 1000  # of a log-normal with the spread .5, cut off
    everything = dataclasses.replace(workload, mean_response_tokens=3840)
    assert (response_lengths(everything) == 3840).all()


def test_loads_add_up():
    workload = dataclasses.replace(
        WORKLOAD,
        num_responses=256,
        mini_batch_size=32,
        mean_response_tokens=50,
        max_response_tokens=100,
    )
    found = loads(workload, 4, 4, 256)
    # 8 mini-batches, of which 4 were packed: their lengths have the whole distribution in them.
    assert found.tokens.shape == (8, 4)
    assert (found.tokens[4:] == found.tokens[:4]).all() and len(set(found.tokens[:, 0])) == 4
    assert found.tokens.sum() == pytest.approx(256 * 52, rel=0.02)
    assert found.outputs.sum() == found.tokens.sum() - 256 * 2
    assert (found.microbatches == found.microbatches[:, :1]).all()
    assert isinstance(found, Loads)


def test_too_long_a_mean_is_refused():
    with pytest.raises(ValueError, match="mean response of 30000 tokens must lie between 1 and"):
        workload_of(VapoConfig(), mean_response_tokens=30000)


def test_sampling_on_two_ranks_by_hand():
    found, alone = (
        generation(SHAPE, config(size), dataclasses.replace(ROUND, num_gpus=size), WORKLOAD, 10**6)
        for size in (2, 1)
    )
    # Two replicas have half of the responses each; prompts, four, likewise.
    assert found.prefill_seconds == alone.prefill_seconds / 2
    tree = config(2).model_dump()
    tree["rollout"]["tensor_model_parallel_size"] = 2
    slow = dataclasses.replace(
        ROUND, num_gpus=2, memory_gb_per_second=1e12, nvlink_gb_per_second=1e12,
        collective_seconds=1e-3,
    )  # fmt: skip
    one = generation(SHAPE, VapoConfig.model_validate(tree), slow, WORKLOAD, 10**6)
    # A replica of two: half of a prompt's products each; 6 steps, 2 collectives in each layer.
    assert one.prefill_seconds == pytest.approx(alone.prefill_seconds / 2)
    assert one.seconds - one.prefill_seconds == pytest.approx(6 * 2 * 4 * 1e-3, rel=1e-3)


def test_a_wider_spread_has_the_same_mean():
    wide = dataclasses.replace(WORKLOAD, num_responses=512, max_response_tokens=1000, spread=1.0)
    lengths = response_lengths(dataclasses.replace(wide, mean_response_tokens=100))
    narrow = response_lengths(dataclasses.replace(wide, mean_response_tokens=100, spread=0.5))
    assert lengths.mean() == pytest.approx(narrow.mean(), abs=1)
    # The median of a log-normal is its mean / exp(spread ** 2 / 2): 60.7 and 88.2.
    assert np.median(lengths) == pytest.approx(60.7, rel=0.03)
    assert np.median(narrow) == pytest.approx(88.2, rel=0.03)

"""Seconds of sampling by hand, and what a step has to do.

Whether a GPU reaches what its data sheet says, and what share of it, is not a test's to say.
"""

import dataclasses

import numpy as np
import pytest

from tests.planning.by_hand import OUTPUT, PAIR, ROUND, SHAPE, TOKEN, WORKLOAD, config
from tests.planning.shapes import changed
from vapo_megatron.config import VapoConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.planning.carry_over import Sizes, _replica, carried_steps
from vapo_megatron.planning.decode import Rank, decode
from vapo_megatron.planning.generation import generation
from vapo_megatron.planning.memory import kv_cache_bytes_per_token
from vapo_megatron.planning.workload import Loads, loads, response_lengths, workload_of

READS = Rank(10.0, token_seconds=0.0, cached_seconds=1.0, sequence_seconds=0.0, step_seconds=0.0)
"""Ten seconds for the weights, and one for each cached token."""


def test_decoding_by_hand():
    # Prompts of 2, responses of 1 and 3. Together: the first step reads 3 + 3 tokens, 16 s; then
    # one is left with 4 and 5 tokens: 14 + 15 s.
    assert decode(READS, [(2, 1), (2, 3)], 2) == (45.0, 0.0, [1, 3])
    # One after the other: 13, then 13 + 14 + 15.
    assert decode(READS, [(2, 1), (2, 3)], 1) == (55.0, 0.0, [1, 3])
    # A batch of 4: both steps with one of them are less than half.
    assert decode(READS, [(2, 1), (2, 3)], 4) == (45.0, 29.0, [1, 3])


def test_decoding_ends_when_it_is_enough():
    whole = []

    def is_enough(index):
        whole.append(index)
        return len(whole) == 2

    # Two at once: after a step the first ends and the third starts; after one more it is whole.
    found = decode(READS, [(2, 1), (2, 3), (5, 1), (2, 9)], 2, is_enough)
    # 10 + 3 + 3, then 10 + 4 + 6.
    assert found == (36.0, 0.0, [1, 2, 1, 0]) and whole == [0, 2]


ONE_SECOND = Rank(1.0, 0.0, 0.0, 0.0, 0.0)
"""A step takes a second, whatever there is to do."""


def carried(lengths, *, groups, extra, max_lag=9, group_size=1, batch=99):
    sizes = Sizes(groups, extra, group_size, max_lag, 2, batch)
    prefilled = []

    def prefill(sequences):
        prefilled.append(sorted(sequences))
        return 0.0

    return list(_replica(ONE_SECOND, prefill, np.array(lengths), 0, sizes)), prefilled


def test_a_step_ends_once_its_groups_are_whole_and_the_others_go_on():
    # All alike: the extra one is whole as well, and waits.
    steps, prefilled = carried([5] * 4, groups=2, extra=1)
    assert [step.seconds for step in steps[:3]] == [5.0, 5.0, 5.0]
    assert prefilled[0] == [2, 2, 2] and prefilled[1] == [2, 2]
    # Where what waits suffices, nothing is sampled.
    steps, prefilled = carried([5] * 4, groups=1, extra=1)
    assert [step.seconds for step in steps[:4]] == [5.0, 0.0, 5.0, 0.0]
    assert prefilled[:2] == [[2, 2], [2, 2]]
    # Three at once: of the second group's two responses one is whole and one has not begun.
    _, prefilled = carried([3] * 8, groups=1, extra=1, group_size=2, batch=3)
    assert prefilled[:2] == [[2, 2], [2, 2]]
    # Two at once, of 3 and 5 tokens: the longer one goes on with 3.
    _, prefilled = carried([3, 5], groups=1, extra=1, max_lag=9, batch=2)
    assert prefilled[:2] == [[2, 2], [2, 2 + 3]]
    # Without extra ones every step waits for its longest.
    steps, _ = carried([1, 1, 1, 40], groups=4, extra=0)
    assert {step.seconds for step in steps} == {40.0}
    # With four of them it ends before, until one has to be waited for.
    lengths = [1, 2, 3, 40]
    steps, prefilled = carried(lengths, groups=4, extra=4, max_lag=3)
    assert steps[0].seconds < 40 and max(step.seconds for step in steps) <= 40
    # What goes on is computed anew, prompt and what there is.
    assert any(max(sequences) > 2 for sequences in prefilled[1:])
    total = sum(step.seconds for step in steps)
    patient, _ = carried(lengths, groups=4, extra=4, max_lag=9)
    assert sum(step.seconds for step in patient) <= total < 8 * 40


def test_no_group_is_older_than_max_lag():
    """One response of 40 in each step's draw; with a lag of 1 it ends in the next step."""
    steps, _ = carried([1] * 7 + [40], groups=8, extra=8, max_lag=1)
    # Two of them are begun at first; afterwards one a step, which runs through two steps.
    two = [a.seconds + b.seconds for a, b in zip(steps, steps[1:])]
    assert min(two) >= 40 - 1


def test_carrying_over_is_faster_than_waiting_and_slower_than_the_work_itself():
    lengths = np.array([10, 20, 40, 80, 160, 320] * 8)
    sizes = Sizes(12, 0, 1, 2, 2, 12)
    seconds = {}
    for extra in (0, 6, 12):
        found = carried_steps(
            ONE_SECOND, lambda sequences: 0.0, lengths, 4, sizes._replace(extra=extra)
        )
        seconds[extra] = sum(step.seconds for step in found) / len(found)
    assert seconds[12] <= seconds[6] < seconds[0]
    # 12 at once, 105 tokens on average.
    assert seconds[12] > 105


def test_decoding_is_bound_by_products_when_there_are_many():
    rank = Rank(1.0, 0.5, 0.0, 0.25, 3.0)
    # 4 sequences: max(1, 2) + 1 + 3 a step.
    assert decode(rank, [(1, 5)] * 4, 4).seconds == pytest.approx(5 * 6.0)


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


EPISODES = dataclasses.replace(WORKLOAD, max_response_tokens=10, turns=3.0, observation_tokens=4)
"""Two observations of 2 tokens each: sequences of 12."""


def test_observations_are_prefilled_and_read_and_not_decoded():
    alone, found = (
        generation(SHAPE, config(), ROUND, each, 10**6) for each in (WORKLOAD, EPISODES)
    )
    # Before an observation 2 + 2 + 3 tokens are cached, on average; its own two see 8 and 9.
    each = 4 * (2 * TOKEN + 17 * PAIR) + OUTPUT
    assert found.prefill_seconds == pytest.approx(alone.prefill_seconds + 2 * each)
    # Six steps as before, each with two more tokens in the cache.
    decoding = [of.seconds - of.prefill_seconds for of in (alone, found)]
    cached = kv_cache_bytes_per_token(SHAPE, config()) / 1e9
    assert decoding[1] - decoding[0] == pytest.approx(6 * 2 * cached)


def test_observations_fill_the_cache():
    # A running sequence has 2 + 3 tokens, and with observations 2 more.
    batches = [generation(SHAPE, config(), ROUND, each, 15).batch for each in (WORKLOAD, EPISODES)]
    assert batches == [3, 2]


def test_observations_are_trained_on_as_the_model_sees_them():
    found = loads(EPISODES, 4, 1, 16)
    assert found.tokens.sum() == 8 * 12 and found.outputs.sum() == 8 * 6
    assert found.pairs.sum() == 8 * 12 * 13 / 2
    assert EPISODES.total_tokens == 8 * 12 and EPISODES.response_tokens == 8 * 6
    # Two sequences of 8 tokens fit into a microbatch of 16, and one of 12.
    alone = loads(WORKLOAD, 4, 1, 16)
    assert set(found.microbatches[:, 0]) == {4} and set(alone.microbatches[:, 0]) == {2}


def test_what_is_sampled_leaves_room_for_observations():
    wide = dataclasses.replace(
        WORKLOAD, num_responses=512, mean_response_tokens=100, max_response_tokens=400, spread=1.0,
        turns=2.0, observation_tokens=150,
    )  # fmt: skip
    assert response_lengths(wide).max() == 250
    assert response_lengths(wide).mean() == pytest.approx(100, abs=1)


def test_assumed_episodes():
    plain = VapoConfig()
    assert (workload_of(plain).turns, workload_of(plain).observation_tokens) == (1.0, 0)
    longest = plain.rollout.max_response_tokens
    playing = changed(plain, environment={"use": "a:B"})
    found = workload_of(playing)
    assert (found.turns, found.observation_tokens) == (4.0, 3 * 256)
    assert found.mean_response_tokens == (longest - 3 * 256) / 2
    few = workload_of(changed(playing, environment={"max_turns": 2}))
    assert (few.turns, few.observation_tokens) == (2.0, 256)
    # What the response leaves.
    full = workload_of(playing, mean_response_tokens=longest - 10)
    assert (full.turns, full.observation_tokens) == (4.0, 10)
    assert workload_of(plain, observation_tokens=7).turns == 4.0
    given = workload_of(plain, turns=2.5, observation_tokens=7)
    assert (given.turns, given.observation_tokens) == (2.5, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"turns": 0.5}, "a mean of 0.5 turns must lie between 1 and"),
        ({"turns": 17.0}, "a mean of 17 turns must lie between 1 and environment.max_turns=16"),
        ({"turns": 1.0, "observation_tokens": 5}, "5 tokens of observations need more than one"),
        ({"mean_response_tokens": 20000, "observation_tokens": 5000}, "less 5000 of observations"),
    ],
)
def test_episodes_that_do_not_fit(options, message):
    playing = changed(VapoConfig(), environment={"use": "a:B"})
    with pytest.raises(ConfigError, match=message):
        workload_of(playing, **options)


def test_a_wider_spread_has_the_same_mean():
    wide = dataclasses.replace(WORKLOAD, num_responses=512, max_response_tokens=1000, spread=1.0)
    lengths = response_lengths(dataclasses.replace(wide, mean_response_tokens=100))
    narrow = response_lengths(dataclasses.replace(wide, mean_response_tokens=100, spread=0.5))
    assert lengths.mean() == pytest.approx(narrow.mean(), abs=1)
    # The median of a log-normal is its mean / exp(spread ** 2 / 2): 60.7 and 88.2.
    assert np.median(lengths) == pytest.approx(60.7, rel=0.03)
    assert np.median(narrow) == pytest.approx(88.2, rel=0.03)

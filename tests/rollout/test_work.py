"""Groups of any sizes, divided among replicas, or taken by them from one list.

Not exercised: a store between processes; tests/rollout/vllm/test_engine.py has one.
"""

import itertools

import pytest

from tests.whole_run import Engine, answered
from vapo_megatron.data.rollout import Prompt
from vapo_megatron.rollout.requests import SamplingSettings
from vapo_megatron.rollout.work import SharedQueue, divide, firsts, generate

SIZES = [4, 1, 2, 3, 5, 1]


def groups_of(sizes):
    """Positions, in groups of these sizes."""
    starts = firsts(sizes)
    return [list(range(start, start + size)) for start, size in starts.items()]


@pytest.mark.parametrize(
    "sizes, replicas, at_once",
    [([4] * 12, 3, 8), ([4] * 10, 3, 10), ([4] * 2, 3, 256), ([1] * 12, 2, 1), (SIZES, 2, 4)],
)
def test_every_position_is_given_once(sizes, replicas, at_once):
    groups = groups_of(sizes)
    first, rest = divide(groups, replicas, at_once)
    given = [position for part in (*first, *rest) for position in part]
    assert sorted(given) == list(range(sum(sizes)))
    assert all(len(part) <= max(at_once, sizes[0]) for part in first)
    assert all(group in groups for group in rest), "groups stay together"


def test_without_a_limit_shares_are_equal_numbers_of_groups():
    assert divide(groups_of([3] * 12), 2, 36) == ([list(range(18)), list(range(18, 36))], [])
    assert divide(groups_of(SIZES), 2, 16) == ([list(range(7)), list(range(7, 16))], [])


def queues(sizes, replicas, at_once):
    """The replicas' queues, with one counter."""
    first, rest = divide(groups_of(sizes), replicas, at_once)
    counter, calls = [0], []

    def add(wanted):
        counter[0] += wanted
        calls.append(wanted)
        return counter[0]

    return [SharedQueue(part, rest, add) for part in first], calls


def test_who_has_room_takes_whole_groups_and_each_is_taken_once():
    (a, b), calls = queues([4] * 10, 2, 8)
    assert a.take(8) == list(range(8)) and b.take(8) == list(range(20, 28)) and calls == []
    # Room for less than a group asks nobody.
    assert a.take(3) == [] and calls == []
    taken = [b.take(4), a.take(9), b.take(8), a.take(4)]
    assert calls == [1, 2, 2, 1]
    assert sorted(itertools.chain(*taken)) == [*range(8, 20), *range(28, 40)]
    assert [len(part) for part in taken] == [4, 8, 8, 4]


def test_there_is_room_for_the_largest_group_that_is_left():
    (a, b), calls = queues(SIZES, 2, 5)
    assert a.take(5) == [0, 1, 2, 3, 4] and b.take(5) == [7, 8, 9]
    # What is left is 2, 5 and 1.
    assert b.take(4) == [] and b.take(6) == [5, 6] and calls == [1]
    assert a.take(10) == [10, 11, 12, 13, 14, 15] and calls == [1, 2]


def test_an_empty_list_is_asked_at_most_once_more():
    (a, b), calls = queues([4] * 5, 2, 8)
    a.take(8), b.take(8)
    assert a.take(8) == list(range(8, 12))
    # More was asked for than there was.
    assert calls == [2] and a.take(8) == [] and calls == [2]
    assert b.take(8) == [] and b.take(8) == [] and calls == [2, 2]


class Noting(Engine):
    """Responds with a request's seed."""

    at_once = max(SIZES)

    def respond(self, rollout, seed):
        return answered(rollout, [seed % 1000])


@pytest.mark.parametrize("how", [{}, {"whole_groups": True}, {"shared": True}])
def test_groups_of_any_size_are_sampled_alike_by_any_replicas(how):
    prompts = [Prompt(i, "", (3,), "") for i, size in enumerate(SIZES) for _ in range(size)]
    settings = SamplingSettings(1.0, 1.0, -1, 9, "train", **how)
    asked = prompts, SIZES, 1, settings, 0
    alone = generate(Noting(0, 1), *asked)
    assert [r.position for r in alone] == list(range(16))
    assert [r.first for r in alone] == [p for p, n in firsts(SIZES).items() for _ in range(n)]
    assert [r.prompt for r in alone] == prompts
    assert len({(r.prompt.index, *r.token_ids) for r in alone}) == 16
    counts = {}
    found = []
    for replica in range(2):
        engine = Noting(replica, 2)
        engine.counts = counts
        found.append(generate(engine, *asked))
    assert sorted(found[0] + found[1], key=lambda r: r.position) == alone
    shared = {r.first for r in found[0]} & {r.first for r in found[1]}
    assert bool(shared) == (not how), "whole groups stay together"

"""Positions that replicas take from one list.

Not exercised: engines and a store between processes; tests/rollout/vllm/test_engine.py has them.
"""

import itertools

import pytest

from vapo_megatron.rollout.shared_queue import SharedQueue, divide


@pytest.mark.parametrize(
    "requests, replicas, unit, at_once",
    [(48, 3, 4, 8), (40, 3, 4, 10), (8, 3, 4, 256), (12, 2, 1, 1)],
)
def test_every_position_is_given_once(requests, replicas, unit, at_once):
    first, rest = divide(requests, replicas, unit, at_once)
    given = [position for part in (*first, *rest) for position in part]
    assert sorted(given) == list(range(requests))
    assert all(len(part) <= at_once for part in first)
    whole = [*rest, *(part[i : i + unit] for part in first for i in range(0, len(part), unit))]
    assert all(len(part) == unit and part[0] % unit == 0 for part in whole)


def test_without_a_limit_shares_are_those_of_assign():
    assert divide(36, 2, 3, 36) == ([range(18), range(18, 36)], [])


def queues(requests, replicas, unit, at_once):
    """The replicas' queues, with one counter."""
    first, rest = divide(requests, replicas, unit, at_once)
    counter, calls = [0], []

    def add(wanted):
        counter[0] += wanted
        calls.append(wanted)
        return counter[0]

    return [SharedQueue(part, rest, add) for part in first], calls


def test_who_has_room_takes_whole_units_and_each_is_taken_once():
    (a, b), calls = queues(40, 2, 4, 8)
    assert a.take(8) == list(range(8)) and b.take(8) == list(range(20, 28)) and calls == []
    # Room for less than a unit asks nobody.
    assert a.take(3) == [] and calls == []
    taken = [b.take(4), a.take(9), b.take(8), a.take(4)]
    assert calls == [1, 2, 2, 1]
    assert sorted(itertools.chain(*taken)) == [*range(8, 20), *range(28, 40)]
    assert [len(part) for part in taken] == [4, 8, 8, 4]


def test_an_empty_list_is_asked_at_most_once_more():
    (a, b), calls = queues(20, 2, 4, 8)
    a.take(8), b.take(8)
    assert a.take(8) == list(range(8, 12))
    # More was asked for than there was.
    assert calls == [2] and a.take(8) == [] and calls == [2]
    assert b.take(8) == [] and b.take(8) == [] and calls == [2, 2]

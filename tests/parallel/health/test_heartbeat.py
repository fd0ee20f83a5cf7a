"""Who is named, and when, by what ranks say of themselves and a clock of the test's.

Not exercised: threads, stores and processes; tests/parallel/health/test_watchdog.py has them.
"""

import dataclasses

import pytest

from vapo_megatron.parallel.health.heartbeat import Observer, Standing

AT_WORK = Standing(place="host, process 7", beat=1, position=(4, 0), phase="critic_update", step=3)


def standings(*changes, limit=10.0):
    """One for each rank; what differs from AT_WORK."""
    base = dataclasses.replace(AT_WORK, limit_seconds=limit)
    return {rank: dataclasses.replace(base, **change) for rank, change in enumerate(changes)}


def overdue_at(observer, found, seconds):
    return {second: observer.overdue(found, second) for second in seconds}


def test_a_rank_that_moves_is_never_overdue():
    observer = Observer(100)
    for second in range(50):
        assert not observer.overdue(standings({"position": (second, 0)}), second)
        assert not observer.overdue(standings({"position": (50, second)}), 50 + second)


def test_the_rank_that_holds_up_the_others_is_named_with_phase_step_and_field():
    observer = Observer(100)
    found = standings({"position": (5, 0), "phase": "sync"}, {})
    told = overdue_at(observer, found, (0, 9, 10, 11))
    assert [bool(text) for text in told.values()] == [False, False, False, True]
    assert told[11] == (
        "rank 1 (host, process 7) in critic_update of step 3 has made no progress for 11 s, "
        "longer than timeouts.update_seconds=10"
    )


def test_waiting_for_a_straggler_costs_nothing_even_when_it_has_come():
    """Rank 0 waits in a short phase while rank 1 may take long, and may still take its own time."""
    observer = Observer(1000)
    waits = {"position": (5, 0), "phase": "exchange", "limit_seconds": 10, "waits": True}
    samples = {"position": (4, 0), "phase": "generation", "limit_seconds": 100}
    assert not any(overdue_at(observer, standings(waits, samples), range(0, 101)).values())
    # It arrives: both have been in the exchange for no time now, whatever rank 0's clock says.
    assert not any(overdue_at(observer, standings(waits, waits), range(101, 112)).values())
    assert "rank 0" in observer.overdue(standings(waits, waits), 112)


def test_updates_within_a_phase_are_progress():
    observer = Observer(100)
    for update in range(5):
        found = standings({"position": (4, update)}, {"position": (4, update)})
        assert not any(overdue_at(observer, found, range(9 * update, 9 * update + 9)).values())
    assert observer.overdue(found, 50)


def test_of_ranks_equally_far_the_one_that_waits_for_nobody_is_named():
    observer, found = Observer(100), standings({"waits": True}, {}, {"waits": True})
    observer.overdue(found, 0)
    assert "rank 1" in (told := observer.overdue(found, 11)) and "rank 0" not in told
    everyone = standings({"waits": True}, {"waits": True})
    assert "rank 0" in (told := observer.overdue(everyone, 11)) and "; rank 1" in told


@pytest.mark.parametrize("limit,silence", [(10.0, 100.0), (100.0, 10.0)])
def test_silence_is_told_after_the_shorter_of_two_limits(limit, silence):
    observer = Observer(silence)
    observer.silent(standings({}, {}, limit=limit), 0)
    alive = {"beat": 2}
    assert not observer.silent(standings(alive, {}, limit=limit), 10)
    assert observer.silent(standings({"beat": 3}, {}, limit=limit), 11) == (
        "rank 1 (host, process 7) in critic_update of step 3 is dead or stopped, silent for 11 s"
    )
    # After a signal less is enough; rank 0 has been silent for 2 s.
    assert "rank 0" not in observer.silent(standings({"beat": 3}, {}, limit=limit), 13, at_most=2)
    assert "rank 0" in observer.silent(standings({"beat": 3}, {}, limit=limit), 13.1, at_most=2)


def test_nothing_is_expected_of_ranks_that_are_over():
    observer, over = Observer(10), {"is_over": True}
    for second in (0, 50):
        assert not observer.silent(standings(over), second)
        assert not observer.overdue(standings(over, {"position": (9, second)}), second)
        assert not observer.overdue(standings(over), second)

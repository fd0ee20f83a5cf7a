"""Which ranks are named, and when, from their heartbeats and a clock that the test sets.

Not exercised: threads, stores and processes; tests/parallel/health/test_watchdog.py has them.
"""

import dataclasses

import pytest

from vapo_megatron.parallel.health.heartbeat import Heartbeat, Monitor

AT_WORK = Heartbeat(place="host, process 7", beat=1, position=(4, 0), phase="critic_update", step=3)


def beats(*changes, limit=10.0):
    """A heartbeat per rank, by its differences from AT_WORK."""
    base = dataclasses.replace(AT_WORK, limit_seconds=limit)
    return {rank: dataclasses.replace(base, **change) for rank, change in enumerate(changes)}


def overdue_at(monitor, found, seconds):
    return {second: monitor.overdue(found, second) for second in seconds}


def test_a_rank_that_moves_is_never_overdue():
    monitor = Monitor(100)
    for second in range(50):
        assert not monitor.overdue(beats({"position": (second, 0)}), second)
        assert not monitor.overdue(beats({"position": (50, second)}), 50 + second)


def test_the_rank_that_holds_up_the_others_is_named_with_phase_step_and_field():
    monitor = Monitor(100)
    found = beats({"position": (5, 0), "phase": "sync"}, {})
    told = overdue_at(monitor, found, (0, 9, 10, 11))
    assert [bool(text) for text in told.values()] == [False, False, False, True]
    assert told[11] == (
        "rank 1 (host, process 7) in critic_update of step 3 has made no progress for 11 s, "
        "longer than timeouts.update_seconds=10"
    )


def test_waiting_for_a_straggler_costs_nothing_even_when_it_has_come():
    """Rank 0 waits in a short phase for rank 1 in a long one; its limit counts from the arrival."""
    monitor = Monitor(1000)
    waits = {"position": (5, 0), "phase": "exchange", "limit_seconds": 10, "in_collective": True}
    samples = {"position": (4, 0), "phase": "generation", "limit_seconds": 100}
    assert not any(overdue_at(monitor, beats(waits, samples), range(0, 101)).values())
    # Rank 1 arrives: both have just begun the exchange, however long rank 0 has waited.
    assert not any(overdue_at(monitor, beats(waits, waits), range(101, 112)).values())
    assert "rank 0" in monitor.overdue(beats(waits, waits), 112)


def test_updates_within_a_phase_are_progress():
    monitor = Monitor(100)
    for update in range(5):
        found = beats({"position": (4, update)}, {"position": (4, update)})
        assert not any(overdue_at(monitor, found, range(9 * update, 9 * update + 9)).values())
    assert monitor.overdue(found, 50)


def test_of_ranks_equally_far_the_one_that_waits_for_nobody_is_named():
    monitor, found = Monitor(100), beats({"in_collective": True}, {}, {"in_collective": True})
    monitor.overdue(found, 0)
    assert "rank 1" in (told := monitor.overdue(found, 11)) and "rank 0" not in told
    everyone = beats({"in_collective": True}, {"in_collective": True})
    assert "rank 0" in (told := monitor.overdue(everyone, 11)) and "; rank 1" in told


def test_where_nobody_shows_that_it_waits_the_line_says_where_all_are():
    """NCCL: ranks 0 to 2 and 5 wait for rank 4 in an .item(); rank 3 went on."""
    waits = {"runs_ahead": True, "where": "parallel/reduce.py:43 (max_over_world)"}
    works = {"runs_ahead": True, "where": "data/packing.py:88 (plan_step)"}
    ahead = {**waits, "position": (5, 0), "phase": "sync"}
    monitor, found = Monitor(100), beats(waits, waits, waits, ahead, works, waits)
    monitor.overdue(found, 0)
    assert monitor.overdue(found, 11) == (
        "step 3 has made no progress for 11 s, longer than timeouts.update_seconds=10, and NCCL "
        "does not say who waits for whom: "
        "rank 3 (host, process 7) in sync at parallel/reduce.py:43 (max_over_world); "
        "rank 4 (host, process 7) in critic_update at data/packing.py:88 (plan_step); "
        "ranks 0-2,5 in critic_update at parallel/reduce.py:43 (max_over_world)"
    )
    scattered = beats(*({**waits, "where": f"line {rank}"} for rank in range(128)))
    monitor.overdue(scattered, 20)
    told = monitor.overdue(scattered, 31)
    assert told.count("rank ") == 8 and told.endswith("at line 7; and 120 more places")


TRAINER = {"world": "trainer", "waits": True}
WORKER = {"world": "rollout worker", "phase": "generation", "position": (90, 0)}


def test_a_world_that_waits_for_the_other_is_not_measured():
    """Two trainers wait for two rollout workers and one of these hangs; positions are per world."""
    monitor = Monitor(1000)
    found = beats(TRAINER, TRAINER, {**WORKER, "position": (91, 0)}, WORKER)
    told = overdue_at(monitor, found, (0, 10, 11))
    assert [bool(text) for text in told.values()] == [False, False, True]
    assert told[11].startswith(
        "rank 3 (rollout worker, host, process 7) in generation of step 3 has made"
    )
    assert "; " not in told[11]


def test_a_trainer_that_does_not_come_to_the_samplers_is_named():
    idle = {"world": "rollout worker", "waits": True, "position": (9, 0)}
    monitor, here = Monitor(1000), {**TRAINER, "position": (5, 0)}
    found = beats(here, {**TRAINER, "waits": False}, idle)
    assert "rank 1 (trainer, " in overdue_at(monitor, found, (0, 11))[11]


def test_the_wait_for_the_other_world_does_not_count_afterwards():
    idle = {"world": "rollout worker", "waits": True}
    monitor = Monitor(1000)
    assert not monitor.overdue(beats({"world": "trainer"}, WORKER), 0)
    assert not any(overdue_at(monitor, beats(TRAINER, WORKER), range(1, 10)).values())
    # The rollout workers have come; the trainers go on in the same phase.
    after = beats({"world": "trainer"}, idle)
    assert not any(overdue_at(monitor, after, range(10, 21)).values())
    assert "rank 0" in monitor.overdue(after, 21)


def test_two_worlds_that_wait_for_each_other_are_named():
    idle = {"world": "rollout worker", "waits": True, "where": "orders.py:80 (wait)"}
    monitor, found = Monitor(1000), beats({**TRAINER, "where": "source.py:9 (_await)"}, idle)
    told = overdue_at(monitor, found, (0, 10, 11))
    assert [bool(text) for text in told.values()] == [False, False, True]
    assert (
        "trainers and rollout workers wait for each other: rank 0 (host, process 7) in "
        "critic_update at" in told[11]
    )


@pytest.mark.parametrize("limit,silence", [(10.0, 100.0), (100.0, 10.0)])
def test_silence_is_told_after_the_shorter_of_two_limits(limit, silence):
    monitor = Monitor(silence)
    monitor.silent(beats({}, {}, limit=limit), 0)
    alive = {"beat": 2}
    assert not monitor.silent(beats(alive, {}, limit=limit), 10)
    assert monitor.silent(beats({"beat": 3}, {}, limit=limit), 11) == (
        "rank 1 (host, process 7) in critic_update of step 3 is dead or stopped, silent for 11 s"
    )
    # After a signal a shorter limit applies; rank 0 has been silent for 2 s.
    assert "rank 0" not in monitor.silent(beats({"beat": 3}, {}, limit=limit), 13, at_most=2)
    assert "rank 0" in monitor.silent(beats({"beat": 3}, {}, limit=limit), 13.1, at_most=2)


def test_nothing_is_expected_of_ranks_that_are_over():
    monitor, over = Monitor(10), {"is_over": True}
    for second in (0, 50):
        assert not monitor.silent(beats(over), second)
        assert not monitor.overdue(beats(over, {"position": (9, second)}), second)
        assert not monitor.overdue(beats(over), second)

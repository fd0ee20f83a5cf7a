"""Seconds and peak memory of phases, by a clock and a memory that move when told to.

Not exercised: what an accelerator holds; what parallel/memory.py makes of its readings is.
"""

import math
import time

import pytest
import torch

from vapo_megatron.config.metrics import describe
from vapo_megatron.config.phases import TIMED
from vapo_megatron.parallel.memory import PeakMemory
from vapo_megatron.run.phase_timer import PhaseTimer, tokens_per_second


class Clock:
    """time.perf_counter that moves when told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("vapo_megatron.run.phase_timer.time.perf_counter", lambda: self.now)


def test_phases_accumulate_and_start_over_with_each_step(monkeypatch):
    clock, started = Clock(monkeypatch), []
    timer = PhaseTimer(on_start=started.append)
    for phase, seconds in (("critic_update", 2.0), ("generation", 1.0), ("critic_update", 3.0)):
        with timer(phase):
            clock.now += seconds
        clock.now += 0.5
    times = timer.take()[0]
    # 2 + 3 and 1 in phases, 3 x 0.5 between them.
    assert list(times.items()) == [
        ("time/generation_seconds", 1.0),
        ("time/critic_update_seconds", 5.0),
        ("time/step_seconds", 7.5),
    ]
    assert started == ["critic_update", "generation", "critic_update"]
    clock.now += 0.25
    assert timer.take()[0] == {"time/step_seconds": 0.25}


def test_a_phase_inside_another_counts_to_the_outer_one(monkeypatch):
    clock, started = Clock(monkeypatch), []
    timer = PhaseTimer(on_start=started.append)
    with timer("evaluation"):
        with timer("generation"):
            clock.now += 4.0
        clock.now += 1.0
    assert timer.take()[0] == {"time/evaluation_seconds": 5.0, "time/step_seconds": 5.0}
    assert started == ["evaluation"]


def test_a_phase_waits_for_the_accelerator_and_survives_an_error(monkeypatch):
    clock = Clock(monkeypatch)

    def synchronize():
        clock.now += 10.0

    timer = PhaseTimer(synchronize=synchronize)
    with timer("sync"):
        clock.now += 1.0
    with pytest.raises(KeyError), timer("values"):
        raise KeyError
    with timer("reward"):
        pass
    assert timer.take()[0] == {
        "time/reward_seconds": 10.0,
        "time/values_seconds": 0.0,
        "time/sync_seconds": 11.0,
        "time/step_seconds": 21.0,
    }


class Ascending:
    """Memory whose n-th phase peaks at n GB."""

    def __init__(self):
        self.phase = 0

    def restart(self):
        self.phase += 1

    def peak_bytes(self):
        return self.phase * 10**9


def test_a_phase_has_its_largest_peak_in_the_step():
    timer = PhaseTimer(memory=Ascending())
    with timer("values"):
        pass
    with timer("sync"), timer("generation"):  # the inner one counts to the outer one
        pass
    with timer("values"):
        pass
    with pytest.raises(KeyError), timer("reward"):
        raise KeyError
    assert timer.take()[1] == {
        "memory/reward_peak_bytes": 4 * 10**9,
        "memory/values_peak_bytes": 3 * 10**9,
        "memory/sync_peak_bytes": 2 * 10**9,
    }
    assert timer.take()[1] == {}
    assert all(describe(f"memory/{phase}_peak_bytes").unit == "bytes" for phase in TIMED)


def test_unknown_phases_are_bugs():
    with pytest.raises(AssertionError, match="lunch"), PhaseTimer()("lunch"):
        pass
    assert all(describe(f"time/{phase}_seconds") for phase in TIMED)


def test_tokens_per_second_leaves_evaluation_and_checkpoint_out():
    times = {"time/evaluation_seconds": 5.0, "time/checkpoint_seconds": 1.0}
    # 800 / (10 - 5 - 1), 800 / 10.
    assert tokens_per_second(800, {**times, "time/step_seconds": 10.0}) == 200.0
    assert tokens_per_second(800, {"time/step_seconds": 10.0}) == 80.0
    assert math.isnan(tokens_per_second(800, {"time/step_seconds": 0.0}))


def test_the_peak_of_a_process_starts_again():
    memory = PeakMemory()
    memory.restart()
    before = memory.peak_bytes()
    held = bytearray(200_000_000)
    held[::4096] = bytes(len(held[::4096]))
    assert memory.peak_bytes() > before + 190_000_000
    del held
    memory.restart()
    assert memory.peak_bytes() < before + 100_000_000
    assert memory.highest_bytes() > before + 190_000_000


def test_the_peak_of_a_gpu_is_what_is_in_use_and_what_torch_gave_back(monkeypatch):
    readings = {
        "is_available": True,
        "mem_get_info": (40, 100),
        "max_memory_reserved": 30,
        "memory_reserved": 10,
        "reset_peak_memory_stats": None,
    }
    for name in readings:
        monkeypatch.setattr(torch.cuda, name, lambda name=name: readings[name])
    memory = PeakMemory()
    # 100 - 40 in use, and 30 - 10 given back.
    assert memory.peak_bytes() == 80
    memory.restart()
    readings |= {"max_memory_reserved": 12, "mem_get_info": (90, 100)}
    assert memory.peak_bytes() == 12 and memory.highest_bytes() == 80


def test_spans_of_outer_phases_are_taken_once():
    timer = PhaseTimer()
    before = time.time()
    with timer("generation"), timer("reward"):
        pass
    with timer("values"):
        pass
    spans = timer.take_spans(7)
    assert [(span.phase, span.step) for span in spans] == [("generation", 7), ("values", 7)]
    times = [t for span in spans for t in (span.begin, span.end)]
    assert before - 1e-3 <= times[0] and times == sorted(times) and times[-1] <= time.time() + 1e-3
    assert timer.take_spans(8) == []

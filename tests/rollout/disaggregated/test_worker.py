"""What a rollout worker has between orders: its idle time, responses in flight, and groups.

Two trainers without models ask two rollout workers; see served.py. Whole runs are in
tests/test_disaggregated_wiring.py. Not exercised: vLLM.
"""

import contextlib
import functools
import itertools
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from tests.dumped import NUM_RESPONSES
from tests.rollout.disaggregated.served import (
    TRAINERS,
    WORKERS,
    Asking,
    Pair,
    WorkersEngine,
    apart,
    inputs,
    is_worker,
    phase,
    served,
)
from vapo_megatron.errors import Stopped
from vapo_megatron.rollout.disaggregated.orders import Orders
from vapo_megatron.rollout.dump import read_file
from vapo_megatron.rollout.partial.files import IN_FLIGHT

CARRIES = {"carry_over_groups": 3, "max_lag": 2}
PAUSE_SECONDS, STEPS = 1.0, 5


@pytest.fixture
def asked(workers, tmp_path):
    """asked(what, rollout, ..., engine) -> what each trainer returns, which calls what(asking, ...)

    rollout: of the settings. asked.held: the versions that each rollout worker holds at the end.
    """
    hf, _ = inputs(tmp_path)

    def run(what, rollout, *args, engine=None, **sections):
        size = rollout.get("tensor_model_parallel_size", 1)
        engine = engine or {1: WorkersEngine, 2: Pair}[size]
        given = apart(hf, tmp_path, tmp_path / "run", rollout=rollout, **sections)
        found = workers.run(TRAINERS + WORKERS, part, given, what, args, engine)
        run.held = found[TRAINERS:]
        return found[:TRAINERS]

    return run


def part(given, what, args, engine):
    if is_worker(given):
        staging = served(given, engine)._staging
        return staging and sorted(staging._held)
    with Asking(given) as asking:
        return what(asking, *args)


def idle(asking):
    """(Seconds since the latest answer, those said to be idle) of two steps after a pause."""
    found, begun = [], time.monotonic()
    asking.source.publish((), 0)
    time.sleep(PAUSE_SECONDS)
    for step in range(2):
        _, metrics = asking.step(step, 0)
        found.append((time.monotonic() - begun, metrics["time/sampler_idle_seconds"]))
        begun = time.monotonic()
    return found


def test_idle_seconds_are_those_since_the_latest_step(asked):
    for (first, paused), (second, rest) in asked(idle, {}):
        assert PAUSE_SECONDS / 2 < paused < first
        assert rest < second < first


def dumped(asking, steps, first=0):
    """Take these steps, of whose responses each trainer returns what the workers dump."""
    root = Path(asking.settings.logging.run_dir) / f"from_{first}"
    for step in steps:
        asking.step(step, 0)
        asking.source.dump(root, step, (), asking.settings.algorithm, keep_last=99)
    return read(root, steps)


def read(root, steps):
    return [
        [s for file in sorted((root / f"step_{step + 1:06d}").iterdir()) for s in read_file(file)]
        for step in steps
    ]


def saved(asking, directory, done, steps):
    """Take steps, then write the checkpoint after the first `done` of them; (dumped, state, sums).

    As a run does that is stopped between a step's responses and its updates.
    """
    found = []
    for step in steps:
        if step == done:
            state = asking.source.state_dict()
        found += dumped(asking, [step])
    state = asking.source.state_dict() if done == steps[-1] + 1 else state
    assert asking.source.finish_in_flight(done, lambda: True)
    return found, state, asking.source.save_in_flight(done, directory)


def resumed(asking, directory, state, done, steps):
    asking.source.load_state_dict(state)
    asking.source.resume(done, directory)
    return dumped(asking, steps, done)


def finished_run(asking, directory, state, done, steps):
    """(What `resumed` returns, the place in the data after it)."""
    found = resumed(asking, directory, state, done, steps)
    return found, asking.source.state_dict()["position"]


CASES = {
    "a step that is not saved": (CARRIES, 1, 2),
    "one step off, a step that is not saved": ({"lag": 1, **CARRIES}, 1, 2),
    "two steps off": ({"lag": 2, **CARRIES}, 1, 1),
    "before the last step, which starts fewer": ({"lag": 1, **CARRIES}, 4, 4),
    "sharded": ({"lag": 1, "tensor_model_parallel_size": 2, **CARRIES}, 2, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_goes_on_where_its_step_ended(asked, tmp_path, case):
    rollout, done, taken = CASES[case]
    (before, state, sums), other = asked(saved, rollout, tmp_path, done, range(taken))
    assert other[1:] == (state, sums)
    assert {n: (tmp_path / n).is_file() for n in sums} == dict.fromkeys(sums, True)
    replicas = WORKERS // rollout.get("tensor_model_parallel_size", 1)
    # Steps ahead, and groups unless the last step is among them.
    lag = rollout.get("lag", 0)
    assert len(sums) == replicas * (lag + (done + lag < STEPS))
    (found, position), _ = asked(finished_run, rollout, tmp_path, state, done, range(done, STEPS))
    assert found[: taken - done] == before[done:]
    drawn = [s.rollout.prompt.index for step in (*before[:done], *found) for s in step[::4]]
    assert len(set(drawn)) == len(drawn) == STEPS * 4
    assert position == STEPS * 4 + 1, "and the row that is refused"


def shortened(asking, directory, state, done, again):
    """Go on with a checkpoint, take a step, and write another; (dumped, state, its files)."""
    found = resumed(asking, directory, state, done, [done])
    assert asking.source.finish_in_flight(done + 1, lambda: True)
    sums = asking.source.save_in_flight(done + 1, again)
    return found, asking.source.state_dict(), sorted(sums)


def test_what_a_run_began_with_is_kept_though_its_lag_is_smaller(asked, tmp_path):
    """Three steps are in flight after the first; a run with a lag of one has two after its step."""
    first, again = tmp_path / "first", tmp_path / "again"
    (_, state, sums), _ = asked(saved, {"lag": 3}, first, 1, range(1))
    assert len(sums) == 3 * WORKERS
    (found, state, names), _ = asked(shortened, {"lag": 1}, first, state, 1, again)
    assert names == [
        f"{IN_FLIGHT}/step_{step:06d}/rank_{rank:05d}.safetensors"
        for step in (3, 4)
        for rank in range(WORKERS)
    ]
    for name in names:
        kept, before = (read_file(root / name) for root in (again, first))
        assert [s.rollout for s in kept] == [s.rollout for s in before]


@pytest.mark.parametrize(("lag", "larger"), [(0, 1), (1, 2)])
def test_a_run_may_go_on_with_a_larger_lag(asked, tmp_path, lag, larger):
    """Its first steps are sampled with the weights that it begins with."""
    (before, state, sums), _ = asked(saved, {"lag": lag}, tmp_path, 1, range(1))
    assert len(sums) == lag * WORKERS
    found, _ = asked(resumed, {"lag": larger}, tmp_path, state, 1, range(1, 4))
    drawn = [s.rollout.prompt.index for step in (*before, *found) for s in step[::4]]
    assert len(set(drawn)) == len(drawn) == 4 * 4


def of_versions(asking):
    """The mean lag of steps that each have weights of their own."""
    return [asking.step(step, step)[1].get("rollout/lag_mean", 0.0) for step in range(5)]


@pytest.mark.parametrize("lag", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2))])
def test_a_step_is_sampled_with_the_weights_of_its_lag(asked, lag):
    """Older ones are dropped: the plan counts lag + 2 versions."""
    expected = [min(step, lag) for step in range(5)]
    assert asked(of_versions, {"lag": lag}) == [expected] * TRAINERS
    for held in asked.held:
        assert held is None if not lag else 4 in held and len(held) <= lag + 2


class Spinning(WorkersEngine):
    """Samples its third step only once there are marks, and answers orders until then."""

    def __init__(self, seed, marks):
        super().__init__(seed)
        self.marks, self.steps = marks, itertools.count()

    def run(self, work, sampling, version, show, has_time):
        assert self.weight == version
        if next(self.steps) == 2:
            while not self.marks.exists():
                assert has_time()
        return super().run(work, sampling, version, show, has_time)


def waiting(asking, marks):
    """Mean lags, where versions 1 and 2 have arrived before step 3 is sampled with version 1."""
    asking.step(0, 0)
    asking.step(1, 1)
    asking.source.publish((), 2)
    marks.touch()
    return [asking.step(step, step)[1]["rollout/lag_mean"] for step in (2, 3, 4)]


def test_a_version_waits_beside_the_one_after_it(asked, tmp_path):
    engine = functools.partial(Spinning, marks=tmp_path / "marks")
    found = asked(waiting, {"lag": 2}, tmp_path / "marks", engine=engine)
    assert found == [[2.0, 2.0, 2.0]] * TRAINERS


def between(asking, directory):
    """Write a checkpoint after step 0 while step 2 is sampled; (its files, dumped)."""
    found = dumped(asking, [0])
    asking.source._orders.give("want", step=1, version=0)
    state = asking.source.state_dict()
    sums = asking.source.save_in_flight(1, directory)
    (directory / "marks").touch()
    return found + dumped(asking, [1, 2]), state, sums


def test_a_checkpoint_between_two_tokens_has_what_was_before_them(asked, tmp_path):
    directory, rollout = tmp_path / "saved", {"lag": 1, **CARRIES}
    engine = functools.partial(Spinning, marks=directory / "marks")
    (found, state, sums), _ = asked(between, rollout, directory, engine=engine)
    assert sum("carried" in name for name in sums) == WORKERS
    assert sum("step_000002" in name for name in sums) == WORKERS == len(sums) // 2
    again, _ = asked(resumed, rollout, directory, state, 1, [1, 2])
    assert again == found[1:]


class Deaf(Pair):
    """Samples in lockstep, as ranks of a replica do; the second sees an order when asked again."""

    def __init__(self, seed):
        super().__init__(seed)
        head, calls = Orders.head, itertools.count()
        late = mock.patch.object(Orders, "head", lambda o: head(o) if next(calls) % 2 else None)
        self.late = late if dist.get_rank() else contextlib.nullcontext()
        self.late.__enter__()

    def run(self, work, sampling, version, show, has_time):
        def together():
            said = [None, None]
            dist.all_gather_object(said, has_time())
            assert said[0] == said[1]
            return said[0]

        return super().run(work, sampling, version, show, together)

    def shutdown(self):
        self.late.__exit__(None, None, None)


def test_a_replicas_ranks_answer_an_order_at_the_same_token(asked):
    rollout = {"lag": 1, "tensor_model_parallel_size": 2}
    found, _ = asked(dumped, rollout, range(3), engine=Deaf)
    assert [len(step) for step in found] == [NUM_RESPONSES] * 3


def finished(asking, answers, has_time):
    """(Whether what is in flight was finished, how often it was asked for)."""
    questions = itertools.count()

    def have_all(what):
        assert what == "sampled/0"
        return next(questions) == answers

    asking.source.publish((), 0)
    with mock.patch.object(asking.source._orders, "have_all", have_all):
        found = asking.source.finish_in_flight(0, lambda: has_time)
    return found, next(questions)


def test_what_is_in_flight_is_waited_for_while_there_is_time(asked):
    """The main trainer asks, and has time for it."""
    assert asked(finished, {"lag": 1}, 4, True) == [(True, 5), (True, 0)]
    assert asked(finished, {"lag": 1}, 99, False) == [(False, 1), (False, 0)]


class Endless(WorkersEngine):
    """Samples in a role until it is told to stop."""

    def __init__(self, seed, role):
        super().__init__(seed)
        self.role = role

    def run(self, work, sampling, version, show, has_time):
        if sampling.seed_role == self.role:
            while has_time():
                time.sleep(0.005)
            raise Stopped
        return super().run(work, sampling, version, show, has_time)


def given_up(asking):
    """What becomes of an evaluation for which there is no time, and of a step after it."""
    asking.source.publish((), 0)
    questions = itertools.count()
    with pytest.raises(Stopped):
        asking.source.evaluate(0, phase, lambda: next(questions) < 3)
    return sorted(asking.step(0, 0)[0])


def test_an_evaluation_is_given_up_on_both_sides(asked, tmp_path):
    evaluation = {"path": str(tmp_path / "test.jsonl"), "samples": 2}
    engine = functools.partial(Endless, role="evaluation")
    one, other = asked(given_up, {}, engine=engine, evaluation=evaluation)
    assert sorted(one + other) == list(range(NUM_RESPONSES))


def out_of_time(asking, rank):
    """What becomes of a step that takes longer than one of the trainers has."""
    asking.source.publish((), 0)
    questions = itertools.count()
    with pytest.raises(Stopped):
        asking.step(0, 0, lambda: dist.get_rank() != rank or next(questions) < 3)
    return True


@pytest.mark.parametrize("rank", range(TRAINERS))
def test_trainers_without_time_do_not_wait_for_a_step(asked, rank):
    engine = functools.partial(Endless, role="train")
    assert asked(out_of_time, {}, rank, engine=engine) == [True, True]

"""Groups that go on over several steps: started, interrupted, waited for, handed over, and kept.

Real bookkeeping of all replicas in one process; what samples is a stand-in that counts tokens. vLLM
is in tests/rollout/vllm/test_partial.py, whole runs are in tests/e2e/test_carry_over.py.
"""

import contextlib
import dataclasses
import itertools
import random
from array import array

import pytest

from tests.whole_run import Engine
from vapo_megatron.config import AlgorithmConfig, RewardConfig, RolloutConfig
from vapo_megatron.data.problems import Problem
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.errors import CheckpointError, Stopped
from vapo_megatron.reward.scoring import Judged
from vapo_megatron.reward.verifier import Verdict
from vapo_megatron.rollout.disaggregated.source import RemoteSampling
from vapo_megatron.rollout.dump import read_header
from vapo_megatron.rollout.partial.files import PARTIAL, Group, Response, write_files
from vapo_megatron.rollout.partial.lag import lag_metrics, tokens_by_version
from vapo_megatron.rollout.partial.sampling import Flight, PartialSampling
from vapo_megatron.rollout.partial.tally import Tally, num_started, shares
from vapo_megatron.rollout.requests import SamplingSettings, continued_seed, start_groups
from vapo_megatron.rollout.sampling import Sampling
from vapo_megatron.rollout.source import StepRequest

SIZE, LIMIT = 2, 20
SETTINGS = SamplingSettings(1.0, 1.0, -1, LIMIT, "train")


class Counting(Engine):
    """Samples one token at a time of a few responses; how long they get depends on the prompt."""

    def __init__(self, *replica, seed=5):
        super().__init__(*replica, seed=seed)
        self.given, self.seeds = [], []

    def token(self, version, at):
        return 100 * version + at

    def run(self, work, sampling, version, show, has_time):
        requests = work.take(self.at_once)
        self.given = [r.rollout for r in requests]
        self.seeds += [(seed, (r.prompt.index, r.sample)) for r, seed, *_ in requests]
        running = {r.position: r for r in self.given}
        while running and not work.is_enough():
            if has_time is not None and not has_time():
                raise Stopped
            for position in sorted(running)[:5]:
                r = running[position]
                length = random.Random(f"{r.prompt.index}/{r.sample}").randint(1, LIMIT)
                at = len(r.token_ids)
                more = array("i", [self.token(version, at)]), array("f", [-at / 4])
                r = r.extended(*more, version, truncated=at + 1 == length == LIMIT)
                running[position] = r
                if at + 1 == length:
                    work.ended(running.pop(position))
        return list(running.values())


class Stream:
    """Judges by the prompt, and only what has been submitted."""

    def __init__(self):
        self.submitted = set()

    def submit(self, rollout):
        self.submitted.add(rollout.position)

    def judged(self, rollouts):
        assert {r.position for r in rollouts} <= self.submitted
        return [
            Judged(f"{r.prompt.index}\udc80", Verdict("correct", note=f"\u4e03 {r.sample}"))
            for r in rollouts
        ]


@contextlib.contextmanager
def phase(name):
    yield lambda *_: None


class Replicas:
    """All replicas of a run."""

    def __init__(self, count, prompts, extra, max_lag, steps):
        self.share_of_step = prompts
        algorithm = AlgorithmConfig(
            responses_per_step=prompts * SIZE, group_size=SIZE, mini_batch_size=SIZE,
            value_pretraining_steps=0, policy_steps=steps,
        )  # fmt: skip
        problems = [Problem(f"p{i}", "7", {"hint": i}) for i in range(prompts * (steps + 2))]
        self.data = [
            PromptDataset(
                problems, lambda text: [3, 4], path="f", seed=1, shuffle=True, max_prompt_tokens=9
            )
            for _ in range(count)
        ]
        self.each = [
            PartialSampling(
                Counting(i, count), self.data[i],
                rollout=RolloutConfig(carry_over_groups=extra, max_lag=max_lag),
                algorithm=algorithm, reward=RewardConfig(), settings=SETTINGS,
            )
            for i in range(count)
        ]  # fmt: skip

    def step(self, step, has_time=None):
        """Responses of all replicas, and the groups that are left."""
        scored, left, before = [], [], self.data[0].state_dict()["position"]
        for replica in self.each:
            asked = StepRequest(step, step, phase, has_time=has_time)
            scored += replica.share(asked, Stream())
            left += replica._after[step + 1].groups
        moved = self.data[0].state_dict()["position"] - before
        assert {c.num_prompts(step) for c in self.each} == {moved}
        return scored, left

    def save(self, done, directory):
        states = [d.state_dict() for d in self.data]
        assert all(state == states[0] for state in states), "all draw the same prompts"
        written = [write_files(directory, c.files(done)) for c in self.each]
        assert not any(problem for problem, _ in written)
        return states[0], [name for _, sums in written for name in sums]

    def load(self, done, state, directory):
        for replica, data in zip(self.each, self.data):
            data.load_state_dict(state)
            replica.load(done, directory)


def drawn_cases():
    for seed in range(25):
        draw = random.Random(seed)
        prompts = draw.randint(1, 7)
        yield (
            draw.randint(1, 3), prompts, draw.randint(0, prompts), draw.randint(1, 3),
            draw.randint(1, 9), seed,
        )  # fmt: skip


@pytest.mark.parametrize(("count", "prompts", "extra", "max_lag", "steps", "seed"), drawn_cases())
def test_each_group_is_handed_over_once_and_in_time(
    count, prompts, extra, max_lag, steps, seed, tmp_path
):
    """And a run that goes on from what was kept, with any number of replicas, loses none either."""
    run = Replicas(count, prompts, extra, max_lag, steps)
    other = Replicas(1 + seed % 4, prompts, extra, max_lag, steps)
    kept_at, trained, elsewhere = seed % steps, [], []
    for step in range(steps):
        if step == kept_at:
            state, _ = run.save(step, tmp_path)
            other.load(step, state, tmp_path)
            elsewhere = list(trained)
        for replicas, indices in ((run, trained), (other, elsewhere)):
            if replicas is other and step < kept_at:
                continue
            scored, left = replicas.step(step)
            assert sorted(s.rollout.position for s in scored) == list(range(prompts * SIZE))
            ordered = sorted(scored, key=lambda s: s.rollout.position)
            for at in range(0, len(ordered), SIZE):
                pair = ordered[at : at + SIZE]
                assert len({s.rollout.prompt.index for s in pair}) == 1
                assert [s.rollout.sample for s in pair] == list(range(SIZE))
                indices.append(pair[0].rollout.prompt.index)
            assert all(group.started > step - max_lag for group in left)
            assert len(left) == (extra if step < steps - 1 else 0)
    for replicas, indices in ((run, trained), (other, elsewhere)):
        assert len(set(indices)) == len(indices) == prompts * steps
        fresh = Replicas(1, prompts, extra, max_lag, steps).data[0].next(prompts * steps)
        assert {p.index for p in fresh} == set(indices), "in the data's order, none left out"
        asked = [pair for each in replicas.each for pair in each._engine.seeds]
        # Of the first token, and another for each response.
        assert len({seed for seed, _ in asked}) == len({who for _, who in asked}) == len(set(asked))


def test_what_was_kept_goes_on_as_if_nothing_had_happened(tmp_path):
    """Tokens, log-probabilities, versions, verdicts, notes, prompts and order."""
    run, again = Replicas(2, 5, 4, 2, 7), Replicas(2, 5, 4, 2, 7)
    for step in range(4):
        run.step(step)
    state, names = run.save(4, tmp_path)
    assert names == [f"{PARTIAL}/replica_{i:05d}.safetensors" for i in range(2)]
    again.load(4, state, tmp_path)
    before = [r for c in run.each for g in c._after[4].groups for r in g.responses]
    assert {r.is_finished for r in before} == {True, False}
    assert any(r.rollout.segments for r in before)
    for step in range(4, 7):
        assert again.step(step) == run.step(step)
        assert [c._engine.given for c in again.each] == [c._engine.given for c in run.each]


def test_groups_may_differ_in_size(tmp_path):
    """Of one replica, which has one, three and two responses in flight, kept and read again."""
    run, again = Replicas(1, 3, 0, 1, 2), Replicas(1, 3, 0, 1, 2)
    sizes = [1, 3, 2]
    prompts = [p for p, n in zip(run.data[0].next(3), sizes) for _ in range(n)]
    groups = start_groups(prompts, sizes, seed=5, step=0, role="train")
    flight = [Group(0, tuple(Response(r.rollout, r.seed) for r in group)) for group in groups]
    run.each[0]._after = {0: Flight(), 1: Flight(tuple(flight), (3,))}
    state, (name,) = run.save(1, tmp_path)
    assert read_header(tmp_path / name).group_size == 0
    again.load(1, state, tmp_path)
    assert again.each[0]._after[1].groups == tuple(flight)
    for replicas in (run, again):
        scored, left = replicas.step(1)
        assert not left and [s.rollout.position for s in scored] == list(range(6))
        assert [s.rollout.prompt for s in scored] == prompts
        assert [s.rollout.first for s in scored] == [0, 1, 1, 1, 4, 4]


def test_a_step_that_is_stopped_changes_nothing(tmp_path):
    run = Replicas(1, 4, 3, 2, 6)
    run.step(0)
    before = run.each[0]._after[1]
    questions = itertools.count()
    with pytest.raises(Stopped):
        run.step(1, lambda: next(questions) < 2)
    assert run.each[0]._after[1] == before
    assert run.save(1, tmp_path)[1]
    # A step that was made, and is not in the checkpoint, does not change what is.
    again = Replicas(1, 4, 3, 2, 6)
    again.step(0)
    again.step(1)
    assert again.each[0]._after[1] == before


def resumes(checkpoint, *, prompts=4, apart=False, **rollout):
    """A checkpoint as a run's two kinds of sources check it; both say the same."""
    placement = {"placement": "disaggregated", "num_processes": 1} if apart else {}
    algorithm = AlgorithmConfig(
        responses_per_step=prompts * SIZE, group_size=SIZE, mini_batch_size=SIZE
    )
    source = object.__new__(RemoteSampling if apart else Sampling)
    source._rollout, source._algorithm = RolloutConfig(**placement, **rollout), algorithm
    source._partial = None
    source.resume(1, checkpoint)


def test_a_checkpoint_whose_groups_a_run_would_lose_is_refused(tmp_path):
    for apart in (False, True):
        resumes(None, apart=apart)
        resumes(tmp_path, apart=apart)
    run = Replicas(2, 4, 3, 2, 6)
    run.step(0)
    run.save(1, tmp_path)
    for apart in (False, True):
        resumes(tmp_path, apart=apart, carry_over_groups=1)
        with pytest.raises(CheckpointError, match="carry_over_groups=0 would lose; set it to 1 or"):
            resumes(tmp_path, apart=apart)
        of_others = "6 responses in flight, in groups of 2, but a step has 2 groups of 2; restore"
        with pytest.raises(CheckpointError, match=of_others):
            resumes(tmp_path, prompts=2, apart=apart, carry_over_groups=1)
    # What a later step has taken of them cannot be sampled again.
    (tmp_path / "in_flight/step_000002").mkdir()
    resumes(tmp_path, apart=True, carry_over_groups=1)
    with pytest.raises(CheckpointError, match="placement=colocated would lose; set it to disagg"):
        resumes(tmp_path, carry_over_groups=1)


def test_the_oldest_are_handed_over_and_who_is_due_is_waited_for():
    tally = Tally([0, 1, 1, 2], [1, 0, 1, 1], step=2, share=2, max_lag=2)
    assert not tally.is_enough()
    tally.finished(3)
    assert not tally.is_enough(), "group 0 is due"
    tally.finished(0)
    assert tally.is_enough() and tally.selected() == [0, 1]
    later = Tally([0, 1, 1, 2], [1, 0, 1, 0], step=2, share=2, max_lag=3)
    assert later.is_enough() and later.selected() == [1, 3]


def test_how_many_are_started():
    assert shares(7, 3) == [3, 2, 2]
    assert [num_started(n, 4, 3, 9) for n in (0, 3, 4)] == [7, 4, 3]
    assert num_started(3, 4, 3, 1) == 1 and num_started(3, 4, 0, 5) == 1


def test_a_part_has_the_seed_of_its_first_token():
    assert continued_seed(12, 0) == 12
    assert len({continued_seed(12, n) for n in range(50)} | {continued_seed(13, 7)}) == 51
    # printf 12/7 | b2sum -l 64
    assert continued_seed(12, 7) == 0x72A1A9E3971DCBBE // 2


def test_the_lag_is_that_of_each_token():
    run = Replicas(1, 1, 0, 1, 1)
    (one, two), _ = run.step(0)
    plain = one.rollout
    mixed = dataclasses.replace(
        two.rollout, token_ids=array("i", [1] * 6), segments=((1, 4), (3, 2)), policy_version=3
    )
    pair = [
        dataclasses.replace(one, rollout=dataclasses.replace(plain, policy_version=3)),
        dataclasses.replace(two, rollout=mixed),
    ]
    tokens, count = tokens_by_version(pair), len(plain.token_ids)
    assert tokens == {1: 4, 3: 2 + count}
    assert lag_metrics(tokens, 3) == {
        "rollout/lag_mean": 8 / (6 + count), "rollout/lag_max": 2.0,
        "rollout/lag_share@2": 4 / (6 + count),
    }  # fmt: skip

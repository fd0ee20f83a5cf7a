"""Dynamic sampling as the trainer asks for it: rounds, seeds, positions, what is kept and counted.

Real processes, data set, verifier, collectives and dump. vLLM alone is a stand-in, which answers as
a table says, so that each branch is met: tests/e2e/test_run.py (slow) samples with vLLM.
"""

import contextlib
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tests.dumped import MODEL, config
from tests.rollout.tiny_tokenizer import ANSWERS
from tests.weights.tiny_hf import write_tiny_model
from tests.whole_run import RIGHT, WRONG, Engine, answered, without_vllm, write_problems
from vapo_megatron.config import AlgorithmConfig
from vapo_megatron.data.rollout import Prompt, Rollout, ScoredRollout
from vapo_megatron.errors import Stopped
from vapo_megatron.rollout.dump import held_steps
from vapo_megatron.rollout.source import StepRequest
from vapo_megatron.rollout.work import firsts


class KindsEngine(Engine):
    """Answers problem i as KINDS[i] says: c all correct, w all wrong, m the group's first alone.

    It leaves out the second response to x, and both to n; those to e are empty.
    """

    def __init__(self, kinds, seed=0):
        super().__init__(seed=seed)
        self.kinds = kinds

    def respond(self, rollout, seed):
        kind = self.kinds[rollout.prompt.index]
        if (kind, rollout.position % 2) == ("x", 1) or kind == "n":
            return None
        if kind == "e":
            return answered(rollout, [], truncated=True)
        right = kind == "c" or (kind, rollout.sample) == ("m", 0)
        answer = RIGHT if right else WRONG
        return answered(rollout, [*(seed // 60**i % 60 for i in range(9)), answer])


class Step(NamedTuple):
    """What one call of `rollouts` gave."""

    scored: list
    """Of all ranks, one after another."""
    metrics: dict[str, float]
    shown: list[tuple[str, int]]
    """Part and size of each round, as the progress bar has it."""
    state: dict[str, Any]
    """Of the data set."""
    replayed: dict[int, list]
    """What a replay reads, of each step that is there."""

    @property
    def positions(self):
        return [s.rollout.position for s in self.scored]

    @property
    def problems(self):
        """Of the groups that are trained on, in their order."""
        return [s.rollout.prompt.index for s in by_position(self)[::2]]


def by_position(step):
    return sorted(step.scored, key=lambda s: s.rollout.position)


def sampling(settings, make_engine):
    """(a Sampling, this rank's place), with `make_engine(seed)` where it would start vLLM."""
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.parallel import groups
    from vapo_megatron.rollout.inputs import read_inputs
    from vapo_megatron.rollout.sampling import Sampling

    c, hf = settings, settings.model.hf_path
    shape, place = read_model_shape(hf), groups.initialize(c.parallel)
    inputs = read_inputs(shape, str(hf), c.data, c.rollout, c.evaluation, seed=c.seed)
    with without_vllm(make_engine):
        source = Sampling(
            inputs, place, model=c.model, rollout=c.rollout, algorithm=c.algorithm,
            reward=c.reward, environment=c.environment, evaluation=c.evaluation,
            logging=c.logging, seed=c.seed, offload=False,
        )  # fmt: skip
    return source, place


def sampled(hf, tmp, kinds, steps, algorithm, state, out_of_time):
    """Of each (step, trains_actor) this rank's Step, or what stopped it; a worker's function.

    The rank `out_of_time` has no time for anything.
    """
    from vapo_megatron.parallel.exchange import gather_summary
    from vapo_megatron.rollout.replay import Replay

    settings = config(
        hf,
        parallel={"world_size": dist.get_world_size()},
        algorithm={"group_size": 2, "dynamic_sampling_max_rounds": 2, **algorithm},
        data={"train_path": str(tmp / "problems.jsonl"), "shuffle": False},
        reward={"num_workers": 1},
        logging={"run_dir": str(tmp / "run"), "dump_steps": 9},
    )
    source, place = sampling(settings, lambda seed: KindsEngine(kinds, seed))
    shown: list = []

    @contextlib.contextmanager
    def phase(name):
        yield lambda done, total, part="": (part, total) in shown or shown.append((part, total))

    found = []
    with contextlib.closing(source):
        if state is not None:
            source.load_state_dict(state)
        for step, trains_actor in steps:
            shown.clear()
            try:
                has_time = lambda: dist.get_rank() != out_of_time  # noqa: E731
                asked = StepRequest(step, 0, phase, trains_actor, has_time)
                scored, metrics = source.rollouts(asked)
                source.keep(step, scored, phase)
                gather_summary(scored, 16)
            except (RuntimeError, Stopped) as error:
                found.append(str(error) or type(error).__name__)
                continue
            dist.barrier()  # The main rank has given the dump its name.
            replay = Replay(tmp / "run", place, "math")
            replayed = {
                s - 1: replay.rollouts(StepRequest(s - 1, 0, phase))[0]
                for s in held_steps(tmp / "run/replay")
            }
            found.append(Step(scored, metrics, list(shown), source.state_dict(), replayed))
    return found


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("sampling_model"), last=ANSWERS, **MODEL)


@pytest.fixture
def sample(workers, hf, tmp_path):
    """sample(num_ranks, kinds, steps) -> their Steps, or what stopped them."""

    def run(num_ranks, kinds, steps, state=None, out_of_time=None, **algorithm):
        write_problems(tmp_path / "problems.jsonl", range(len(kinds)))
        algorithm = {"dynamic_sampling": True, **algorithm}
        given = hf, tmp_path, kinds, steps, algorithm, state, out_of_time
        ranks = workers.run(num_ranks, sampled, *given)
        joined = []
        for (step, _), *parts in zip(steps, *ranks, strict=True):
            first = parts[0]
            if isinstance(first, str):
                assert parts == [first] * num_ranks, "every rank is told the same"
                joined.append(first)
                continue
            for part in parts:
                assert part[1:4] == first[1:4], "every rank decides alike"
                assert part.positions == sorted(part.positions)
                groups = [p // 2 for p in part.positions]
                assert groups[::2] == groups[1::2], "a rank holds whole groups"
                assert part.replayed[step] == part.scored, "what is dumped is what is trained on"
            joined.append(first._replace(scored=[s for part in parts for s in part.scored]))
        return joined

    return run


#        the first step's rounds: 8, then 7    the second's: 8, then 8, into the next epoch
KINDS = "mwmmcmwm" + "cmwmwmm" + "wwcwwwwm" + "wwww"


def test_rounds_are_refilled_cut_and_filled_up(sample):
    """By hand; on one rank and on two, in one go and resumed after the first step."""
    first, second = sample(2, KINDS, [(0, True), (1, True)])

    # 5 of 8 are mixed: 3 more take (3 + sqrt(3 * 3/8)) / (5/8) = 6.5 prompts, and one is too many.
    assert first.problems == [0, 2, 3, 5, 7, 9, 11, 13]
    assert first.shown == [("", 16), ("round 2", 14)]
    assert first.metrics == {
        "rollout/sampling_rounds": 2,
        "rollout/groups_sampled": 15,
        "rollout/groups_dropped_all_correct": 2,
        "rollout/groups_dropped_all_wrong": 4,
        "rollout/groups_dropped_surplus": 1,
        "rollout/groups_filled": 0,
        # 9 mixed groups with one each, 2 with two, of 15 with two.
        "rollout/sampled_correct_fraction": 13 / 30,
    }
    assert (first.state["epoch"], first.state["position"]) == (0, 15)

    # 1 of 8, then 3 of 8 that end in the next epoch: the first four others fill up.
    assert second.problems == [15, 16, 17, 18, 22, 0, 2, 3]
    assert second.shown == [("", 16), ("round 2", 16)]
    assert second.metrics == {
        "rollout/sampling_rounds": 2,
        "rollout/groups_sampled": 16,
        # Problem 17 fills up, as do 15, 16 and 18 of the wrong ones.
        "rollout/groups_dropped_all_correct": 0,
        "rollout/groups_dropped_all_wrong": 8,
        "rollout/groups_dropped_surplus": 0,
        "rollout/groups_filled": 4,
        # 4 mixed groups and one that is correct.
        "rollout/sampled_correct_fraction": 6 / 32,
    }
    assert (second.state["epoch"], second.state["position"]) == (1, 4)

    for step in (first, second):
        assert sorted(step.positions) == list(range(16))
        for item in step.scored:
            r = item.rollout
            assert (r.position % 2, r.prompt.index) == (r.sample, step.problems[r.position // 2])
            kind = KINDS[r.prompt.index]
            assert item.is_correct == (kind == "c" or (kind, r.sample) == ("m", 0))

    # One rank, on which everything is sampled, goes on where the data stood after the first step.
    (resumed,) = sample(1, KINDS, [(1, True)], first.state)
    assert resumed.scored == by_position(second)
    assert resumed[1:4] == second[1:4]
    assert resumed.replayed[0] == by_position(first), "in order, whoever wrote it"


def test_mixed_groups_alone_make_the_step_that_it_is_without(sample):
    """Bit for bit, also where a step asks for what comes; the data are 8 problems in a circle."""
    dynamic, pretraining = sample(2, "mmmmmmmm", [(3, True), (3, False)])
    (plain,) = sample(1, "mmmmmmmm", [(3, True)], dynamic_sampling=False)
    assert by_position(dynamic) == by_position(pretraining) == plain.scored
    assert dynamic.state == plain.state
    assert dynamic.metrics["rollout/sampling_rounds"] == 1
    assert dynamic.metrics["rollout/groups_sampled"] == 8
    assert pretraining.metrics == plain.metrics == {}


def test_exhausted_rounds(sample):
    """The one mixed group of 8 problems, three times, and no copies of it."""
    kinds = "mwwwwwww"
    (before, step) = sample(2, kinds, [(0, False), (0, True)], dynamic_sampling_max_rounds=3)
    assert before.problems == list(range(8)), "value pretraining takes what comes"
    assert before.shown == [("", 16)]
    assert before.metrics == {}
    assert step.problems == [0, 1, 2, 3, 4, 5, 0, 0]
    assert step.shown == [("", 16), ("round 2", 16), ("round 3", 16)]
    assert step.metrics["rollout/groups_filled"] == 5
    assert step.metrics["rollout/groups_dropped_all_wrong"] == 16
    responses = [tuple(s.rollout.token_ids) for s in step.scored if s.rollout.prompt.index == 0]
    assert len(responses) == len(set(responses)) == 6


def test_a_rank_may_keep_no_group(sample):
    """The second rank's are all wrong: it dumps no file, and the step is replayed nevertheless."""
    (step,) = sample(2, "mmmmwwww", [(0, True)])
    assert step.problems == [0, 1, 2, 3] * 2
    assert [len(found) for found in step.replayed.values()] == [16]


def test_what_the_sampler_leaves_out_stops_every_rank(sample):
    """A group that lacks a response, and a sampler that gives none; an empty response is wrong."""
    kinds = "mmeemmmm" + "mmxmmmmm" + "mmmxmmmm" + "n" * 16
    steps = [(0, False), (1, True), (2, False), (3, True), (4, False)]
    empty, cut, late, none, nothing = sample(2, kinds, steps)
    assert sorted(empty.positions) == list(range(16))
    wrong = [s for s in empty.scored if not s.rollout.token_ids]
    assert [s.rollout.prompt.index for s in wrong] == [2, 2, 3, 3]
    assert {(s.status, s.reward) for s in wrong} == {("unparsable", -1.0)}
    assert "left out 1 of 16 responses: group 2 (from 0) has 1 of 2;" in cut
    assert "left out 1 of 16 responses, at positions 7;" in late
    assert "left out 16 of 16 responses: group 0 (from 0) has 0 of 2;" in none
    assert "left out 16 of 16 responses, at positions 0, 1, 2, 3, 4, 5, 6, 7, 8, ...;" in nothing


def test_every_rank_stops_when_one_has_no_time(sample):
    assert sample(2, "m" * 9, [(0, True)], out_of_time=1) == ["Stopped"]
    assert sample(2, "m" * 9, [(0, False)], out_of_time=0) == ["Stopped"]


def unequal(sizes, kinds):
    """What this rank keeps of groups of these sizes, of which it sampled every other response."""
    from vapo_megatron.rollout.dynamic_sampling import Round, sample_mixed_groups

    made = []
    for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        prompt = Prompt(i, "", (3,), "")
        right = {"c": size, "w": 0, "m": 1}[kind]
        made.append([(prompt, "correct" if j < right else "wrong") for j in range(size)])

    def sample(round, count):
        some = [made.pop(0) for _ in range(count)]
        starts = firsts(list(map(len, some)))
        scored = [
            ScoredRollout(answered(Rollout.empty(prompt, j, first + j, 0), [4]), "", status, 0.0)
            for first, group in zip(starts, some)
            for j, (prompt, status) in enumerate(group)
        ]
        mine = [s for s in scored if s.rollout.position % 2 == dist.get_rank()]
        return Round(mine, list(map(len, some)))

    algorithm = AlgorithmConfig(responses_per_step=3, group_size=1, mini_batch_size=3)
    return sample_mixed_groups(sample, lambda name: contextlib.nullcontext(), algorithm)


def test_groups_may_differ_in_size_and_be_on_several_ranks(workers):
    ranks = workers.run(2, unequal, [4, 2, 3, 1, 5, 2], "mcmwwm")
    kept = sorted((s.rollout for scored, _ in ranks for s in scored), key=lambda r: r.position)
    assert [r.prompt.index for r in kept] == [0] * 4 + [2] * 3 + [5] * 2
    assert [r.position for r in kept] == list(range(9))
    assert [r.first for r in kept] == [0] * 4 + [4] * 3 + [7] * 2
    for _, metrics in ranks:
        assert metrics["rollout/groups_dropped_all_correct"] == 1
        assert metrics["rollout/groups_dropped_all_wrong"] == 2
        assert metrics["rollout/sampled_correct_fraction"] == 5 / 17

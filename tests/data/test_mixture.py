"""Several sources as one: proportions step by step, the sources' own orders, resuming, errors.

Not exercised: reading the sources' files (tests/rollout/test_inputs.py), several ranks
(tests/rollout/test_sampling.py).
"""

import itertools
import json
import random
from collections import Counter

import pytest

from tests.data.test_prompts import tokenize
from vapo_megatron.config import SourceConfig
from vapo_megatron.data.mixture import Mixture
from vapo_megatron.data.prompts import Problem, PromptDataset
from vapo_megatron.errors import DataError

WEIGHTS = {"code": 1.0, "math": 2.0, "qa": 1.0}


def part(name, count=10, first_index=0, **changed):
    problems = [Problem(f"{name} {i}", str(i), {}, name) for i in range(count)]
    kept = {"seed": 0, "shuffle": True, "max_prompt_tokens": 99, **changed}
    return PromptDataset(
        problems, tokenize, path=f"{name}.jsonl", source=name, first_index=first_index, **kept
    )


def mixture(weights_after=lambda steps: WEIGHTS, counts=(5, 20, 10), names=tuple(WEIGHTS), **more):
    starts = itertools.accumulate(counts, initial=0)
    parts = {name: part(name, *sizes, **more) for name, *sizes in zip(names, counts, starts)}
    return Mixture(parts, weights_after)


def sources(prompts):
    return [prompt.source for prompt in prompts]


def test_every_stretch_of_a_step_has_the_proportions():
    drawn = sources(mixture().next(400, 0))
    # Weights 1, 2, 1: of every four, one, two and one.
    assert all(Counter(drawn[i : i + 4]) == {"code": 1, "math": 2, "qa": 1} for i in range(396))


def test_counts_follow_the_shares_to_about_a_prompt():
    """Any weights, changed after every step: the worst of 300 steps of any of 30 mixtures."""
    draw = random.Random(0)
    for names in (["a", "b"], ["a", "b", "c", "d", "e"]):
        for _ in range(30):
            tables = [{n: draw.random() ** 3 + 1e-3 for n in names} for _ in range(300)]
            mixed = mixture(tables.__getitem__, [7] * len(names), names)
            due, given = Counter(), Counter()
            for step, weights in enumerate(tables):
                count = draw.randrange(20)
                given.update(sources(mixed.next(count, step)))
                for name in names:
                    due[name] += count * weights[name] / sum(weights.values())
                off = max(abs(due[name] - given[name]) for name in names)
                assert off <= (0.5 + 1e-9 if len(names) == 2 else 1.2), (names, step)


def test_a_schedule_takes_a_source_in_and_out():
    """By hand: math alone, then half of each, then code alone; nothing of what weighs nothing."""
    math = SourceConfig(path="m", schedule=[[1, 1], [3, 0]])
    code = SourceConfig(path="c", weight=2, schedule=[[1, 0], [3, 0.5]])
    assert [math.weight_after(s) for s in range(6)] == [1, 1, 0.5, 0, 0, 0]
    assert [code.weight_after(s) for s in range(6)] == [0, 0, 0.5, 1, 1, 1]
    assert SourceConfig(path="m", weight=3).weight_after(7) == 3
    assert SourceConfig(path="m", weight=3, schedule=[[5, 2]]).weight_after(7) == 6
    weights = lambda steps: {"math": math.weight_after(steps), "code": code.weight_after(steps)}  # noqa: E731
    mixed = mixture(weights, (9, 9), ("math", "code"))
    counts = [Counter(sources(mixed.next(8, step))) for step in range(5)]
    assert counts == [{"math": 8}, {"math": 8}, {"math": 4, "code": 4}, {"code": 8}, {"code": 8}]


def test_each_source_goes_through_epochs_of_its_own():
    mixed = mixture()
    drawn = mixed.next(80, 0)
    for name, count in (("code", 5), ("math", 20), ("qa", 10)):
        own = [p.text for p in drawn if p.source == name]
        whole = {f"{name} {i}" for i in range(count)}
        epochs = [own[i : i + count] for i in range(0, len(own), count)]
        assert len(epochs) > 1 and all(set(epoch) == whole for epoch in epochs)
        assert own == [p.text for p in part(name, count).next(len(own))], "its order is its own"
    assert len({p.index for p in drawn}) == 35
    assert all(mixed.rows[p.index] == p.problem for p in drawn)
    same_count = [[p.index for p in part(name).next(10)] for name in ("code", "math")]
    assert same_count[0] != same_count[1], "sources of one size are not in step"


def test_another_source_changes_no_other_sources_order():
    weights = {name: WEIGHTS[name] for name in ("code", "math")}
    two, three = mixture(lambda _: weights, (5, 20), ("code", "math")), mixture()
    of_two = [p.text for p in two.next(60, 0) if p.source == "math"]
    of_three = [p.text for p in three.next(60, 0) if p.source == "math"]
    shorter = min(len(of_two), len(of_three))
    assert shorter >= 30 and of_two[:shorter] == of_three[:shorter]


def test_a_draw_depends_on_the_step_and_the_place_alone_not_on_the_calls():
    """Dynamic sampling draws several times in a step."""
    whole, pieces = mixture(), mixture()
    expected = [whole.next(20, step) for step in range(3)]
    found = [
        list(itertools.chain(*(pieces.next(count, step) for count in (3, 0, 1, 16))))
        for step in range(3)
    ]
    assert found == expected
    assert [p.text for p in mixture(seed=1).next(20, 0)] != [p.text for p in expected[0]]


def shifting(steps):
    """Weights that no step shares with another."""
    return {"code": 1 + 0.37 * steps, "math": 3.0, "qa": max(0.0, 1 - 0.2 * steps)}


@pytest.mark.parametrize("taken", range(0, 9, 2))
def test_a_resumed_mixture_goes_on_in_the_middle_of_a_schedule(taken):
    mixed = mixture(shifting)
    for step in range(taken):
        mixed.next(7, step)
    state = json.loads(json.dumps(mixed.state_dict()))
    expected = [mixed.next(7, step) for step in range(taken, 12)]
    resumed = mixture(shifting)
    resumed.next(5, 3)
    resumed.check_state(state)
    resumed.load_state_dict(state)
    assert [resumed.next(7, step) for step in range(taken, 12)] == expected
    assert resumed.state_dict() == mixed.state_dict()


def test_other_weights_are_the_users_choice_when_a_run_goes_on():
    mixed = mixture()
    mixed.next(8, 0)
    other = mixture(lambda steps: {**WEIGHTS, "math": 0.0})
    other.load_state_dict(mixed.state_dict())
    assert Counter(sources(other.next(8, 1))) == {"code": 4, "qa": 4}


def test_states_of_other_sources_are_refused():
    state, one_file = mixture().state_dict(), part("code").state_dict()
    for other, of, message in (
        (mixture(seed=3), state, "data of data.sources.code: its seed was 0 .* is 3 now; restore"),
        (mixture(counts=(5, 21, 10)), state, "sources.math: its number of problems was 20 .* 21"),
        (mixture(shuffle=False), state, "data.sources.code: its data.shuffle was True"),
        (
            mixture(names=("code", "math"), counts=(5, 20)), state,
            "the data: data.sources were code, math, qa when .* are code, math now; restore them",
        ),
        (mixture(), one_file, "data.sources were none when .* are code, math, qa now"),
        (mixture(), {}, "was written by a replay, which has no"),
        (part("code"), state, "data.sources were code, math, qa when .* there are none now"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=f"^cannot resume .*{message}"):
            other.check_state(of)


def test_a_row_is_found_in_its_file():
    mixed = mixture()
    assert len(mixed) == len(mixed.rows) == 35
    assert mixed.path == "code.jsonl, math.jsonl, qa.jsonl"
    found = [mixed.row(index) for index in (0, 4, 5, 24, 25, 34)]
    assert found == [
        ("code.jsonl", 0), ("code.jsonl", 4), ("math.jsonl", 0), ("math.jsonl", 19),
        ("qa.jsonl", 0), ("qa.jsonl", 9),
    ]  # fmt: skip
    assert part("code").row(3) == ("code.jsonl", 3)


def test_rows_are_left_out_of_their_source():
    some = mixture(counts=(2, 4, 3))
    some.leave_out({0: "bad", 3: "worse"})
    assert some.left_out == {0: "bad", 3: "worse"}
    kept = [1, 2, 4, 5, 6, 7, 8]
    assert [i for i, _ in some.kept] == kept == [p.index for p in some.problems]
    assert {p.index for p in some.next(40, 0)} == set(kept)
    assert [some.prompt(i).problem for i in range(9)] == list(some.rows)

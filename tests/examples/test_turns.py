"""Turns with luck: the environment, the exact values, and what is measured against them.

Not exercised here: training on it (-m slow runs the quick form).
"""

import itertools
import json
import random
import subprocess
import sys

import numpy as np
import pytest

from tests.examples.tiny import ROOT

# isort: split
from turns import luck, train


def played(seed, choose):
    """An episode's observations, and the last Step."""
    environment = luck.TurnsWithLuck()
    seen = [environment.reset(None, seed)]
    while True:
        step = environment.step(choose(seen[-1]) + "!#$")
        if step.done:
            return seen, step
        seen.append(step.observation)


def best(observation):
    return luck.good_choice(luck.SITUATIONS.index(observation[2]))


def worst(observation):
    return "yx"["xy".index(best(observation))]


def test_an_episode_states_itself():
    seen, step = played(3, best)
    assert len(seen) == luck.TURNS and played(3, best) == (seen, step)
    left, successes, _ = zip(*seen)
    assert [luck.COUNTS.index(each) for each in left] == list(range(luck.TURNS))[::-1]
    counts = [luck.COUNTS.index(each) for each in successes]
    assert counts[0] == 0 and all(b - a in (0, 1) for a, b in itertools.pairwise(counts))
    total = int(step.note.split()[0])
    assert total - counts[-1] in (0, 1) and step.verdict == (total >= luck.GOAL)


@pytest.mark.parametrize(
    ("choose", "chance"), [(best, luck.GOOD), (worst, luck.BAD), (lambda seen: "!", luck.BAD)]
)
def test_choices_succeed_as_often_as_they_should(choose, chance):
    rates = [played(seed, choose)[1].verdict for seed in range(400)]
    due = luck.chance_of_goal(chance)[luck.TURNS][0]
    assert np.mean(rates) == pytest.approx(due, abs=4 * (due * (1 - due) / 400) ** 0.5 + 1e-9)


def test_the_table_is_the_binomial_tail():
    table, draw = luck.chance_of_goal(0.3), random.Random(0)
    assert [row[luck.GOAL] for row in table] == [1.0] * (luck.TURNS + 1)
    for left, successes in ((1, luck.GOAL - 1), (5, luck.GOAL - 2), (luck.TURNS, 0)):
        wins = [
            successes + sum(draw.random() < 0.3 for _ in range(left)) >= luck.GOAL
            for _ in range(20000)
        ]
        assert table[left][successes] == pytest.approx(np.mean(wins), abs=0.012)


def episodes(count, good_share=0.5):
    """Observations, choices and rewards of a policy that chooses well in this share of turns."""
    seen, chosen, rewards = [], [], []
    for seed in range(count):
        draw = random.Random(f"policy {seed}")
        actions = []

        def choose(observation, draw=draw, actions=actions):
            actions.append((best if draw.random() < good_share else worst)(observation))
            return actions[-1]

        observations, step = played(seed, choose)
        seen.append(observations)
        chosen.append(actions)
        rewards.append(1.0 if step.verdict else -1.0)
    return seen, chosen, np.array(rewards)


def measured(advantages=None, values=None, count=300):
    seen, chosen, rewards = episodes(count)
    shape = len(seen), luck.TURNS
    logprobs = np.full(shape, np.log(0.5))
    if advantages is None:
        advantages = np.random.default_rng(0).normal(size=shape)
    return train.credit(seen, chosen, rewards, logprobs, advantages, values), seen, chosen, rewards


def test_exact_values_explain_more_in_later_turns():
    found, *_ = measured()
    explained = found["best_explained"]
    assert abs(explained[0]) < 0.1 and explained[7] > 0.15 and explained[15] > 0.6
    assert found["explained"] is None and found["good_choices"] == pytest.approx(0.5, abs=0.02)
    assert abs(found["correlation"]) < 0.05, "advantages by chance"


def test_the_exact_values_as_a_critics_explain_as_much():
    """Of each state, with all situations alike, by the tails that the docstring has."""
    _, seen, _, _ = measured()
    table = 2 * np.array(luck.chance_of_goal(0.5)) - 1
    state = np.array([[luck.COUNTS.index(c) for c in o[:2]] for of in seen for o in of])
    values = table[state[:, 0] + 1, state[:, 1]].reshape(len(seen), luck.TURNS)
    found, *_ = measured(values=values)
    assert found["explained"] == pytest.approx(found["best_explained"], abs=0.02)


def test_advantages_that_know_luck_correlate():
    _, seen, chosen, rewards = measured()
    good = np.array([[c == best(o) for o, c in zip(os, cs)] for os, cs in zip(seen, chosen)])
    of_choice, *_ = measured(advantages=np.where(good, 1.0, -1.0))
    of_outcome, *_ = measured(advantages=np.repeat(rewards[:, None], luck.TURNS, 1))
    # Its signs are right; how much is won differs from state to state.
    assert of_choice["correlation"] > 0.6
    assert 0.05 < of_outcome["correlation"] < of_choice["correlation"] / 2


def test_what_starts_the_runs_loads_no_torch():
    """Their processes are forked from it, and would inherit its threads."""
    code = "import sys, turns.main; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "examples/tiny", check=True)


@pytest.mark.slow
def test_the_quick_form(tmp_path):
    subprocess.run(
        ["bash", "examples/run_turns_tiny.sh", "--quick", "--out", str(tmp_path)], cwd=ROOT,
        check=True, timeout=900,
    )  # fmt: skip
    table = (tmp_path / "table.md").read_text()
    assert "| VAPO |" in table and "| GRPO |" in table and "best possible accuracy" in table
    rows = (tmp_path / "seed_0/vapo/credit.jsonl").read_text().splitlines()
    assert len(rows) == 5 and all(json.loads(row)["explained"] for row in rows)

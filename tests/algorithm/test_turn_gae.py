"""GAE over turns against sums by hand, a plain loop, and token-level GAE where the two agree."""

import random

import pytest
import torch

from vapo_megatron.algorithm.gae import decoupled_gae
from vapo_megatron.algorithm.turn_gae import turn_gae, turn_layout


def test_layout_by_hand():
    # Three tokens in turns of two and one, nothing, one turn of two.
    starts = torch.tensor([1, 0, 1, 0, 0])
    layout = turn_layout(starts, torch.tensor([0, 3, 3, 5], dtype=torch.int32))
    assert layout.number.tolist() == [0, 0, 1, 2, 2]
    assert layout.first.tolist() == [0, 2, 3]
    assert layout.cu_turns.tolist() == [0, 2, 2, 3]
    whole = turn_layout(None, torch.tensor([0, 3, 3, 5]))
    assert whole.number.tolist() == [0, 0, 0, 1, 1] and whole.cu_turns.tolist() == [0, 1, 1, 2]


def test_by_hand():
    """Two turns, rewards .25 on the way and 1 at the end; lambda .5, gamma 1.

    V is .5 before the first turn and .75 before the second: deltas .25 + .75 - .5 = .5 and
    1 - .75 = .25, so that A is .5 + .5 * .25 = .625 and .25. Returns at lambda 1: 1.25 and 1.
    """
    rewards = torch.tensor([0.0, 0.25, 0.0, 0.0, 1.0])
    values = torch.tensor([0.5, 9.0, 0.75, -9.0, 9.0])
    layout = turn_layout(torch.tensor([True, False, True, False, False]), torch.tensor([0, 5]))
    advantages, returns = turn_gae(rewards, values, layout, lambda_actor=0.5)
    assert advantages.tolist() == [0.625, 0.625, 0.25, 0.25, 0.25]
    assert returns.tolist() == [1.25, 1.25, 1.0, 1.0, 1.0]


def by_loop(rewards, values, turns, lam, gamma):
    """Of one response, whose turns are lists of tokens: advantages, by turn."""
    found, after, value_after = [0.0] * len(turns), 0.0, 0.0
    for k in reversed(range(len(turns))):
        first = turns[k][0]
        delta = sum(rewards[t] for t in turns[k]) + gamma * value_after - values[first]
        after = found[k] = delta + gamma * lam * after
        value_after = values[first]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_by_a_plain_loop(seed):
    draw = random.Random(seed)
    sizes = [[draw.randint(1, 4) for _ in range(draw.randint(0, 5))] for _ in range(7)]
    rewards, values, starts, bounds, expected, returned = [], [], [], [0], [], []
    lambdas = torch.tensor([draw.random() for _ in sizes], dtype=torch.float64)
    for number, response in enumerate(sizes):
        turns, at = [], len(rewards)
        for size in response:
            turns.append(list(range(at, at + size)))
            starts += [True] + [False] * (size - 1)
            at += size
        rewards += [draw.gauss(0, 1) for _ in range(sum(response))]
        values += [draw.gauss(0, 1) for _ in range(sum(response))]
        bounds.append(len(rewards))
        actor = by_loop(rewards, values, turns, float(lambdas[number]), 0.9)
        critic = by_loop(rewards, values, turns, 0.7, 0.9)
        for k, turn in enumerate(turns):
            expected += [actor[k]] * len(turn)
            returned += [critic[k] + values[turn[0]]] * len(turn)
    layout = turn_layout(torch.tensor(starts), torch.tensor(bounds))
    advantages, returns = turn_gae(
        *(torch.tensor(x, dtype=torch.float64) for x in (rewards, values)), layout,
        lambda_actor=lambdas, lambda_critic=0.7, gamma=0.9,
    )  # fmt: skip
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)
    assert returns.tolist() == pytest.approx(returned, abs=1e-12)


def test_turns_of_one_token_are_token_level_gae():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 9, generator=generator)
    bounds = torch.tensor([0, 4, 4, 9])
    settings = {"lambda_actor": 0.8, "lambda_critic": 0.9, "gamma": 0.95}
    by_turn = turn_gae(rewards, values, turn_layout(torch.ones(9), bounds), **settings)
    for found, expected in zip(by_turn, decoupled_gae(rewards, values, bounds, **settings)):
        assert torch.equal(found, expected)


def test_one_turn_at_lambda_1_is_the_return_against_the_prompts_value():
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, -1.0])
    values = torch.tensor([0.25, 0.5, 0.75, 0.5, 9.0])
    layout = turn_layout(None, torch.tensor([0, 3, 5]))
    advantages, _ = turn_gae(rewards, values, layout, lambda_actor=1.0)
    assert advantages.tolist() == [0.75, 0.75, 0.75, -1.5, -1.5]


def test_no_tokens():
    layout = turn_layout(None, torch.tensor([0, 0]))
    advantages, returns = turn_gae(torch.zeros(0), torch.zeros(0), layout, lambda_actor=0.5)
    assert advantages.numel() == returns.numel() == 0

"""Advantages where groups differ in size and rewards stand before the last token, by hand.

Not exercised: the equations themselves (tests/algorithm), what a step makes of one turn
(tests/test_trainer_wiring.py).
"""

import itertools
import json
from array import array
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import cut
from vapo_megatron.config import AlgorithmConfig, ParallelConfig
from vapo_megatron.data.batch import StepSummary
from vapo_megatron.data.rollout import Prompt, Rollout, ScoredRollout
from vapo_megatron.parallel import groups
from vapo_megatron.roles.advantages import with_advantages

# Groups of three, one and two responses, of one token each.
FIRSTS, REWARDS = [0, 0, 0, 3, 4, 4], [1.0, -1.0, 1.0, 1.0, 0.0, 1.0]
SHARES = {1: [[0, 1, 2, 3, 4, 5]], 2: [[5, 1, 3], [4, 0, 2]]}


def batch_of(positions, lengths, **columns):
    lengths = torch.tensor(lengths)
    tokens = torch.zeros(int((lengths + 1).sum())).long()
    return cut.batch_of(tokens, lengths + 1, lengths, positions=torch.tensor(positions), **columns)


def summary_of(rewards, firsts, lengths, earned=None):
    zeros, lengths = torch.zeros(len(rewards)).long(), torch.tensor(lengths)
    given = zeros + 1, lengths, zeros, zeros.bool(), torch.tensor(rewards), zeros
    return StepSummary(*given, torch.tensor(firsts), zeros, earned=earned)


def of_groups(estimator, earned):
    ranks = groups.initialize(ParallelConfig(world_size=dist.get_world_size()))
    own = SHARES[ranks.world_size][ranks.rank]
    algorithm = AlgorithmConfig(advantage_estimator=estimator, positive_lm_coef=0.0)
    summary = summary_of(REWARDS, FIRSTS, [1] * 6, earned)
    batch = with_advantages(
        summary, batch_of(own, [1] * 3 * (2 // ranks.world_size)), algorithm, ranks
    )
    return dict(zip(own, batch.advantages.tolist()))


@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_of_different_size(workers, world_size):
    # Means 1/3, 1, 1/2; sample standard deviations sqrt(4/3), none, sqrt(1/2).
    wide, narrow = (4 / 3) ** 0.5, 0.5**0.5
    expected = {
        "dr_grpo": [2 / 3, -4 / 3, 2 / 3, 0, -0.5, 0.5],
        "grpo": [2 / 3 / wide, -4 / 3 / wide, 2 / 3 / wide, 0, -0.5 / narrow, 0.5 / narrow],
    }
    for estimator, advantages in expected.items():
        found = {}
        for part in workers.run(world_size, of_groups, estimator, None):
            found |= part
        assert [found[p] for p in range(6)] == pytest.approx(advantages, abs=1e-5), estimator


def test_a_group_compares_all_that_was_earned(workers):
    # On the way the last response earned -1: its group has nothing to choose between.
    earned = torch.tensor([0.0, 0, 0, 0, 0, -1])
    ((found),) = workers.run(1, of_groups, "dr_grpo", earned)
    assert [found[p] for p in (4, 5)] == [0, 0] and found[1] == pytest.approx(-4 / 3)


def by_gae(values, token_rewards, reward, algorithm):
    ranks = groups.initialize(ParallelConfig(world_size=1))
    count = len(values)
    columns = {"token_rewards": torch.tensor(token_rewards)} if any(token_rewards) else {}
    batch = batch_of(
        [0], [count], values=torch.tensor(values), rewards=torch.tensor([reward]), **columns
    )
    summary = summary_of([reward], [0], [count])
    batch = with_advantages(summary, batch, AlgorithmConfig(**algorithm), ranks)
    return batch.advantages.tolist(), batch.returns.tolist()


@pytest.mark.parametrize(
    ("given", "algorithm", "advantages", "returns"),
    [
        # lambda 0: r + V' / 2 - V, and the verdict's 10 beside the last token's own .3.
        (
            ([0.5, -0.2, 0.3], [0.1, 0.2, 0.3], 10.0),
            {"gamma": 0.5, "lambda_actor": 0.0, "lambda_critic": 0.0},
            [-0.5, 0.55, 10.0], [0.0, 0.35, 10.3],
        ),
        # gamma .9, lambda .5: the gap between two turns does not count.
        (
            ([0.0, 0.0], [0.0, 0.0], 2.0),
            {"gamma": 0.9, "lambda_actor": 0.5, "lambda_critic": 1.0},
            [0.9, 2.0], [1.8, 2.0],
        ),
        # Two turns of two tokens, the first earns -1; lambda 1: what is left to earn, less V.
        (
            ([0.25, 0.5, -0.5, 1.0], [0.0, -1.0, 0.0, 0.0], 1.0),
            {"lambda_actor": 1.0, "lambda_critic": 1.0},
            [-0.25, -0.5, 1.5, 0.0], [0.0, 0.0, 1.0, 1.0],
        ),
    ],
)  # fmt: skip
def test_rewards_of_turns_stand_where_they_were_earned(
    workers, given, algorithm, advantages, returns
):
    ((found, targets),) = workers.run(1, by_gae, *given, algorithm)
    assert found == pytest.approx(advantages) and targets == pytest.approx(returns)


def of_turns(**fields):
    """Two responses of five and two tokens, the first in turns of two and three."""
    ranks = groups.initialize(ParallelConfig(world_size=1))
    algorithm = AlgorithmConfig(gae_unit="turn", advantage_whitening=False, **fields)
    batch = batch_of(
        [0, 1], [5, 2],
        values=torch.tensor([0.5, 9.0, 0.75, -9.0, 9.0, 0.25, 9.0]),
        token_rewards=torch.tensor([0.0, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0]),
        turn_starts=torch.tensor([1, 0, 1, 0, 0, 1, 0], dtype=torch.int32),
        rewards=torch.tensor([1.0, -1.0]),
    )  # fmt: skip
    batch = with_advantages(summary_of([1.0, -1.0], [0, 1], [5, 2]), batch, algorithm, ranks)
    return batch.advantages.tolist(), batch.returns.tolist()


def test_lambda_may_count_turns(workers):
    """tests/algorithm/test_turn_gae.py has the sums; adaptive: 1 - 1 / (alpha l), l turns."""
    ((advantages, returns),) = workers.run(1, of_lambda, 0.5)
    assert advantages == [0.625, 0.625, 0.25, 0.25, 0.25, -1.25, -1.25]
    assert returns == [1.25, 1.25, 1.0, 1.0, 1.0, -1.0, -1.0]
    ((adaptive, _),) = workers.run(1, of_lambda, "adaptive", 1.0)
    # Two turns: lambda is 1/2. One turn: 0.
    assert adaptive == advantages


def of_lambda(lambda_actor, alpha=0.05):
    return of_turns(lambda_actor=lambda_actor, length_adaptive_alpha=alpha)


VECTORS = json.loads((Path(__file__).parent / "multi_turn.json").read_text())


def episode_of(row):
    """The response whose sequence has the row's actions and observations behind one prompt token.

    Rewards and values of observations have no place in it.
    """
    runs = [(bool(k), len(list(run))) for k, run in itertools.groupby(row["is_action"])]
    inserted, ends, count = [], [], 0
    for is_action, length in runs:
        if is_action:
            count += length
            ends.append(count)
        else:
            inserted.append((count, array("i", [9] * length)))
    if "turn_rewards" in row:
        earned = [(end - 1, x) for end, x in zip(ends, row["turn_rewards"], strict=True)]
        reward = row["final_reward"]
    else:
        own = [x for k, x in zip(row["is_action"], row["token_rewards"], strict=True) if k]
        earned, reward = list(enumerate(own)), float(row.get("terminal", 0))
    ids, logprobs = array("i", [1] * count), array("f", [0.0] * count)
    rollout = Rollout(
        Prompt(0, "", (3,), ""), 0, 0, ids, logprobs, False, 0, inserted=tuple(inserted)
    )
    return ScoredRollout(rollout, "", "wrong", reward, token_rewards=tuple(earned))


def of_rows(rows):
    ranks = groups.initialize(ParallelConfig(world_size=1))
    found = []
    for row in rows:
        item = episode_of(row)
        # V of a token is read one place before it; the row has it in the token's own place.
        places = item.rollout.places - 1
        length = len(places)
        batch = batch_of(
            [0], [length], values=torch.tensor(row["values"], dtype=torch.float64)[places],
            rewards=torch.tensor([item.reward]),
            token_rewards=torch.from_numpy(item.column("token_rewards")),
        )  # fmt: skip
        algorithm = AlgorithmConfig(
            gamma=row["gamma"] or 1e-30,  # 0 is none of the configuration's.
            lambda_actor="adaptive" if "alpha" in row else row["lambda_actor"],
            lambda_critic=row.get("lambda_critic", 1.0),
            length_adaptive_alpha=row.get("alpha", 1.0),
        )
        batch = with_advantages(summary_of([0.0], [0], [length]), batch, algorithm, ranks)
        for name in ("advantages", "returns"):
            whole = torch.zeros(len(row["values"]), dtype=torch.float64)
            whole[places] = getattr(batch, name).double()
            found.append((whole.tolist(), row.get(name)))
    return found


def test_observations_are_in_no_sum(workers):
    """Numbers of other libraries' tests, and of the definition in float64, of whole sequences."""
    ((found),) = workers.run(1, of_rows, VECTORS["peers"] + VECTORS["serial"])
    compared = [(got, wanted) for got, wanted in found if wanted is not None]
    assert len(compared) == 16
    for got, wanted in compared:
        assert got == pytest.approx(wanted, abs=1e-6)

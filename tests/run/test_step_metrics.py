"""Advantages and metrics of a step over real data-parallel ranks, against numbers by hand.

Does not exercise pipeline or tensor parallelism: their ranks hold the same batch.
"""

import dataclasses

import pytest
import torch

from tests import cut
from vapo_megatron.data.batch import StepSummary
from vapo_megatron.data.labels import NO_LABELS, labels_of
from vapo_megatron.data.problems import Problem
from vapo_megatron.data.rollout import CUTS, STATUSES
from vapo_megatron.run.step_metrics import episode_metrics, metrics_by_label, reward_spread

LENGTHS = [2, 3, 1]
REWARDS = [1.0, -1.0, 1.0]
VALUES = [0.5, 0.5, 0.0, -0.5, -1.0, 0.25]
DIFFERENCES = [0.0, 0.01, 0.02, 0.0, 0.0, 0.04]


def batch_of(responses):
    """The batch of some of the three responses; prompts of one token."""
    starts = [0, 2, 5]
    tokens = [t for r in responses for t in range(starts[r], starts[r] + LENGTHS[r])]
    lengths = torch.tensor([LENGTHS[r] for r in responses])
    return cut.batch_of(
        torch.zeros(len(tokens) + len(responses)).long(),
        lengths + 1,
        lengths,
        positions=torch.tensor(responses),
        rewards=torch.tensor([REWARDS[r] for r in responses]),
        is_correct=torch.tensor([REWARDS[r] > 0 for r in responses]),
        rollout_logprobs=torch.tensor([-1.0 - DIFFERENCES[t] for t in tokens]),
        old_logprobs=torch.full((len(tokens),), -1.0),
        values=torch.tensor([VALUES[t] for t in tokens]),
    )


def on_rank(shares, algorithm, limit):
    """Advantages, returns, metrics and the sampler's difference; errors come back as text."""
    import torch.distributed as dist

    from vapo_megatron.algorithm.agreement import LogprobsDiffer
    from vapo_megatron.config import AlgorithmConfig, ParallelConfig
    from vapo_megatron.parallel import groups
    from vapo_megatron.roles.advantages import with_advantages
    from vapo_megatron.run.step_metrics import logprob_difference, step_metrics

    place = groups.initialize(ParallelConfig(world_size=dist.get_world_size()))
    config = AlgorithmConfig(**algorithm)
    summary = StepSummary(
        prompt_lengths=torch.ones(3, dtype=torch.long),
        response_lengths=torch.tensor(LENGTHS),
        statuses=torch.tensor([0, 1, 0]),
        truncated=torch.tensor([False, True, False]),
        rewards=torch.tensor(REWARDS),
        prompt_indices=torch.tensor([4, 4, 7]),
        firsts=torch.arange(3),
        sources=torch.zeros(3, dtype=torch.long),
    )
    batch = with_advantages(summary, batch_of(shares[place.rank]), config, place)
    entropy = torch.full_like(batch.values, 0.25)
    labels = labels_of([(4, Problem("", source="a")), (7, Problem("", source="b"))], "math")
    metrics = step_metrics(summary, batch, entropy, config, place, labels)
    try:
        metrics |= logprob_difference(batch, limit, place, is_stale=True)
    except LogprobsDiffer as error:
        metrics["refused"] = str(error)
    return batch.advantages, batch.returns, metrics


SHARES = {1: [[0, 1, 2]], 2: [[1], [0, 2]]}


@pytest.mark.parametrize("world_size", [1, 2])
def test_numbers_by_hand(workers, world_size):
    algorithm = {"lambda_actor": 0.0, "lambda_critic": 1.0}
    results = workers.run(world_size, on_rank, SHARES[world_size], algorithm, None)
    order = [r for share in SHARES[world_size] for r in share]
    returns = torch.cat([r[1] for r in results])
    # lambda_critic 1: every token's return is its response's reward.
    expected = [REWARDS[r] for r in order for _ in range(LENGTHS[r])]
    assert returns.tolist() == expected
    # lambda_actor 0: A_t = r_t + V_{t+1} - V_t.
    by_response = {0: [0.0, 0.5], 1: [-0.5, -0.5, 0.0], 2: [0.75]}
    advantages = torch.cat([r[0] for r in results])
    assert advantages.tolist() == [a for r in order for a in by_response[r]]
    for _, _, metrics in results:
        assert metrics["num_tokens"] == 6
        assert metrics["reward/mean"] == pytest.approx(1 / 3)
        assert metrics["reward/correct_fraction"] == pytest.approx(2 / 3)
        assert metrics["rollout/truncated_fraction"] == pytest.approx(1 / 3)
        assert metrics["rollout/response_length_mean"] == 2
        assert metrics["actor/entropy"] == pytest.approx(0.25)
        # (0 + .5 - .5 - .5 + 0 + .75) / 6
        assert metrics["algorithm/advantage_mean"] == pytest.approx(0.25 / 6)
        # returns 1 1 -1 -1 -1 1: variance 1; errors .5 .5 -1 -.5 0 .75: mean .25/6 and mean
        # square (.25 + .25 + 1 + .25 + 0 + .5625) / 6
        variance = 2.3125 / 6 - (0.25 / 6) ** 2
        assert metrics["critic/explained_variance"] == pytest.approx(1 - variance)
        assert metrics["critic/value_error_mean"] == pytest.approx(-0.25 / 6)
        assert metrics["critic/return_std"] == pytest.approx(1)
        # Source a has the first two responses: returns 1 1 -1 -1 -1, errors .5 .5 -1 -.5 0.
        explained = 1 - (1.75 / 5 - 0.1**2) / (1 - 0.2**2)
        assert metrics["critic/by_source/a/explained_variance"] == pytest.approx(explained)
        assert metrics["critic/by_source/a/value_error_mean"] == pytest.approx(0.1)
        assert metrics["critic/by_source/b/explained_variance"] == 0, "its returns are all equal"
        assert metrics["critic/by_source/b/value_error_mean"] == pytest.approx(-0.75)
        assert metrics["rollout/logprob_diff_mean"] == pytest.approx(0.07 / 6, rel=1e-4)
        assert metrics["rollout/logprob_diff_max"] == pytest.approx(0.04, rel=1e-4)
        # Ratios 1, e^.01, e^.02, 1, 1, e^.04: their sum 6.071062, that of their squares 6.144299.
        effective = 6.071062**2 / (6 * 6.144299)
        assert metrics["rollout/effective_sample_fraction"] == pytest.approx(effective, abs=1e-6)


def test_same_as_actor_and_adaptive_lambda(workers):
    algorithm = {"lambda_critic": "same_as_actor", "length_adaptive_alpha": 0.05}
    _, returns, metrics = workers.run(1, on_rank, SHARES[1], algorithm, None)[0]
    # Lengths up to 3 at alpha 0.05: lambda is clamped to 0, so the returns are r_t + V_{t+1}.
    assert returns.tolist() == [0.5, 1.0, -0.5, -1.0, -1.0, 1.0]
    assert metrics["algorithm/lambda_actor_mean"] == 0


def with_the_second_cut_off(algorithm):
    """Advantages of the second response, and the mean lambda."""
    from vapo_megatron.config import AlgorithmConfig, ParallelConfig
    from vapo_megatron.parallel import groups
    from vapo_megatron.roles.advantages import with_advantages, with_loss_mask
    from vapo_megatron.run.step_metrics import step_metrics

    place = groups.initialize(ParallelConfig(world_size=1))
    config = AlgorithmConfig(length_adaptive_alpha=1.0, **algorithm)
    truncated, zeros = torch.tensor([False, True, False]), torch.zeros(3).long()
    summary = StepSummary(
        zeros + 1, torch.tensor(LENGTHS), zeros, truncated, torch.tensor(REWARDS), zeros,
        torch.arange(3), zeros,
    )  # fmt: skip
    batch = with_loss_mask(batch_of([0, 1, 2]).replace(truncated=truncated), config)
    batch = with_advantages(summary, batch, config, place)
    metrics = step_metrics(summary, batch, batch.values, config, place)
    return batch.advantages[2:5].tolist(), metrics["algorithm/lambda_actor_mean"]


def test_the_adaptive_lambda_counts_the_response_or_its_actions(workers):
    # alpha 1, lengths 2, 3, 1: lambda 1/2, 2/3, 0; without actions in the second: 1/2, 0, 0.
    # V 0, -1/2, -1 and R -1: delta -1/2, -1/2, 0.
    whole = [-0.5 - 1 / 3, -0.5, 0.0], (1 / 2 + 2 / 3) / 3
    cut = [-0.5, -0.5, 0.0], 1 / 6
    masked = {"overlong_filtering": True}
    for algorithm, (advantages, mean) in (
        (masked, whole),
        ({"gae_length": "action"}, whole),
        (masked | {"gae_length": "action"}, cut),
    ):
        ((found, of_lambda),) = workers.run(1, with_the_second_cut_off, algorithm)
        assert found == pytest.approx(advantages) and of_lambda == pytest.approx(mean)


def test_whitening_uses_all_ranks(workers):
    algorithm = {"lambda_actor": 0.0, "advantage_whitening": True}
    results = workers.run(2, on_rank, SHARES[2], algorithm, None)
    advantages = torch.cat([r[0] for r in results])
    assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages.std(unbiased=False).item() == pytest.approx(1, abs=1e-5)
    assert abs(results[0][0].mean().item()) > 0.1, "a rank alone has another mean"
    # One rank with all responses computes the same: those of 0, 1, 2 are tokens 0:2, 2:5, 5:6.
    alone = workers.run(1, on_rank, SHARES[1], algorithm, None)[0][0]
    torch.testing.assert_close(advantages, alone[[2, 3, 4, 0, 1, 5]], rtol=0, atol=1e-7)


def test_metrics_by_name_count_every_response_once():
    """Five responses, of problems 4 4 1 1 7; problem 9 is not in this step."""
    summary = StepSummary(
        prompt_lengths=torch.ones(5).long(), response_lengths=torch.tensor([2, 4, 3, 9, 5]),
        statuses=torch.tensor([STATUSES.index(s) for s in ("correct", "wrong", "correct",
                                                           "timed_out", "failed")]),
        truncated=torch.zeros(5).bool(),
        # The second is wrong and the third correct: accuracy is of verdicts, not of rewards.
        rewards=torch.tensor([1.0, 0.5, -0.5, -1, -0.25]),
        prompt_indices=torch.tensor([4, 4, 1, 1, 7]), firsts=torch.arange(5),
        sources=torch.zeros(5).long(),
    )  # fmt: skip
    labels = labels_of([
        (1, Problem("", "", {"verifier": "code"}, "b")), (4, Problem("", source="a")),
        (7, Problem("", source="b")), (9, Problem("", "", {"verifier": "taste"}, "b")),
    ], "math")  # fmt: skip
    assert metrics_by_label(summary, labels) == pytest.approx({
        "reward/by_verifier/math/share": 3 / 5, "reward/by_verifier/math/accuracy": 1 / 3,
        "reward/by_verifier/math/reward_mean": 1.25 / 3,
        "reward/by_verifier/math/response_length_mean": 11 / 3,
        "reward/by_verifier/math/failed_fraction": 1 / 3,
        "reward/by_verifier/code/share": 2 / 5, "reward/by_verifier/code/accuracy": 1 / 2,
        "reward/by_verifier/code/reward_mean": -1.5 / 2,
        "reward/by_verifier/code/response_length_mean": 6.0,
        "reward/by_verifier/code/failed_fraction": 1 / 2,
        "reward/by_verifier/taste/share": 0.0,
        "reward/by_source/a/share": 2 / 5, "reward/by_source/a/accuracy": 1 / 2,
        "reward/by_source/a/reward_mean": 1.5 / 2, "reward/by_source/a/response_length_mean": 3.0,
        "reward/by_source/a/failed_fraction": 0.0,
        "reward/by_source/b/share": 3 / 5, "reward/by_source/b/accuracy": 1 / 3,
        "reward/by_source/b/reward_mean": -1.75 / 3,
        "reward/by_source/b/response_length_mean": 17 / 3,
        "reward/by_source/b/failed_fraction": 2 / 3,
    })  # fmt: skip
    one = labels_of([(i, Problem("", source="a")) for i in (1, 4, 7)], "math")
    assert metrics_by_label(summary, one) == metrics_by_label(summary, NO_LABELS) == {}


def test_names_count_where_there_are_several():
    plain, code = Problem("p"), Problem("p", "", {"verifier": "code"})
    found = labels_of([(0, plain), (3, code)], "math")
    assert found.of == {"verifier": {0: "math", 3: "code"}, "source": {}}
    assert found.several == {"verifier": ["code", "math"]}
    assert found.by_name("verifier", {3: "x", 0: "y"}) == {"code": ["x"], "math": ["y"]}
    found = labels_of([(0, plain), (1, code)], "code")
    assert found.of["verifier"] == {0: "code", 1: "code"} and not found.several
    own = [(i, Problem("p", source=name)) for i, name in enumerate("aab")]
    assert labels_of(own, "math").several == {"source": ["a", "b"]}
    assert not labels_of(own[:2], "math").several and not NO_LABELS.several


def test_a_sampler_that_differs_stops_every_rank(workers):
    # .04 on one of six tokens, which lies on the second rank alone; the mean is .0117.
    for _, _, metrics in workers.run(2, on_rank, SHARES[2], {}, 0.03):
        assert "0.0117 in the mean (limit 0.003)" in metrics["refused"]
        assert "rollout.max_logprob_difference=0.03" in metrics["refused"]
    for _, _, metrics in workers.run(2, on_rank, SHARES[2], {}, 0.12):
        assert "refused" not in metrics
        assert metrics["rollout/logprob_diff_high_fraction"] == 0


def summary_of(rewards, sizes, statuses=None, scores=None):
    """Groups of these sizes."""
    zeros = torch.zeros(len(rewards)).long()
    statuses = zeros if statuses is None else torch.tensor(statuses)
    firsts = torch.tensor([sum(sizes[:i]) for i, size in enumerate(sizes) for _ in range(size)])
    given = zeros + 1, zeros + 1, statuses, zeros.bool(), torch.tensor(rewards), zeros, firsts
    return StepSummary(*given, zeros, scores=None if scores is None else torch.tensor(scores))


def test_the_spread_of_rewards_by_hand():
    # Groups (1, -1), (1, 1), (-1, -1), (1, 0): standard deviations 1, 0, 0, 1/2.
    found = reward_spread(summary_of([1.0, -1, 1, 1, -1, -1, 1, 0], [2] * 4), uses_scores=False)
    assert found == {
        # Mean 1/8, mean square 7/8.
        "reward/std": pytest.approx((7 / 8 - 1 / 64) ** 0.5),
        "reward/group_std_mean": 1.5 / 4,
        "reward/equal_groups_fraction": 0.5,
    }
    # Exactly 0, though float32's 0.1 has a mean that rounds.
    equal = reward_spread(summary_of([0.1] * 6, [3, 3]), uses_scores=False)
    assert equal["reward/std"] == 0 and equal["reward/equal_groups_fraction"] == 1
    assert reward_spread(summary_of([0.1, 0.2], [1, 1]), uses_scores=False).keys() == {"reward/std"}


def test_groups_of_different_size_have_their_own_spread():
    # (1, -1, 1, -1), (1), (0.5, 0.5): 1, 0, 0.
    found = reward_spread(summary_of([1.0, -1, 1, -1, 1, 0.5, 0.5], [4, 1, 2]), uses_scores=False)
    assert found["reward/group_std_mean"] == pytest.approx(1 / 3)
    assert found["reward/equal_groups_fraction"] == pytest.approx(2 / 3)


def test_scores_that_rewards_do_not_show():
    nan = float("nan")
    # Right, wrong, wrong, unparsable: 1 and 0 say no more than the verdict, 0.3 does, and the last
    # has no score.
    given = [1.0, -1, -1, -1], [0, 1, 1, 2], [1.0, 0.0, 0.3, nan]
    unused = "reward/unused_score_fraction"
    assert (
        reward_spread(summary_of(given[0], [2, 2], *given[1:]), uses_scores=False)[unused] == 0.25
    )
    assert unused not in reward_spread(summary_of(given[0], [2, 2], *given[1:]), uses_scores=True)
    assert unused not in reward_spread(summary_of(given[0], [2, 2]), uses_scores=False)


def test_episodes_by_hand():
    numbers = torch.zeros(4, dtype=torch.long)
    summary = StepSummary(*[numbers] * 8)
    assert episode_metrics(summary) == {}
    summary = dataclasses.replace(
        summary, turns=torch.tensor([1, 2, 2, 3]), failed_calls=torch.tensor([0, 5, 0, 1]),
        inserted_lengths=torch.tensor([0, 10, 6, 8]), earned=torch.tensor([0.0, 1.0, 2.0, 1.0]),
        environment_failed=torch.tensor([True, False, False, False]),
        cuts=torch.tensor([0, CUTS.index("environment.max_turns"), 0, 1]),
    )  # fmt: skip
    assert episode_metrics(summary) == {
        "rollout/turns_mean": 2.0, "rollout/observation_tokens_mean": 6.0,
        "rollout/turn_reward_mean": 0.5, "rollout/environment_failed_fraction": 0.25,
        "rollout/failed_calls_mean": 1.5, "rollout/cut_by_turns_fraction": 0.25,
        "rollout/cut_by_action_fraction": 0.0, "time/environment_seconds": 0.0,
    }  # fmt: skip

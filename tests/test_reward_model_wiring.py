"""A step whose responses a reward model judges in part: everything behind the scores sees them.

Whole trainers on two data-parallel ranks, over a source that leaves half of its responses without a
verdict; expected are transformers' scores in float64 and loops over them. Then a replay of what was
dumped, without the reward model. Other layouts are in tests/roles/test_reward_model.py. Not
exercised: vLLM, a GPU, who is pending while sampling (tests/reward/test_scoring.py).
"""

import dataclasses
import math
import shutil
from statistics import fmean, stdev

import pytest
import torch
import torch.distributed as dist

from tests.distributed.float64 import load_critic
from tests.dumped import GROUP_SIZE, MODEL, NUM_RESPONSES, rollouts, write
from tests.weights.tiny_hf import write_tiny_hf, write_tiny_reward_model
from tests.whole_run import Given, settings, trainer

LOW, HIGH, THRESHOLD, BUFFER = -2.0, 2.0, 1.0, 4
REWARD = {
    "verifier": "reward_model", "from_score": [LOW, HIGH], "correct_from": THRESHOLD,
    "overlong_buffer_tokens": BUFFER, "overlong_penalty": 0.5, "max_failed_fraction": 1.0,
}  # fmt: skip
LONGEST = 12


def is_pending(item):
    """Of every group two responses; two are truncated."""
    return item.rollout.position % 2 == 1


def on_rank(item):
    """Which rank sampled it: each rank has a pair of every group."""
    return item.rollout.position // 2 % 2


def sampled():
    """The responses as they are after sampling."""
    return [
        dataclasses.replace(s, status="pending", reward=math.nan) if is_pending(s) else s
        for s in rollouts(1)
    ]


def step(tmp, replay):
    """(a step's data, its metrics, what was kept, what was shown); a worker's function."""
    given = settings(
        tmp / "hf",
        tmp / "run",
        model={"reward_hf_path": str(tmp / ("gone" if replay else "reward"))},
        reward=REWARD,
        algorithm={"advantage_estimator": "grpo", "policy_steps": 1},
        parallel={"world_size": 2, "max_tokens_per_microbatch": 24, "offload": True},
    )
    rank, prepared, shown = dist.get_rank(), [], []
    source = Given(lambda _: [s for s in sampled() if on_rank(s) == rank])
    place = {"replay": tmp / "dumped"} if replay else {"source": lambda _: source}
    with trainer(given, **place) as made:
        prepare, rollouts_shown = made.prepare, made.output.rollouts
        made.prepare = lambda s: prepared.append(prepare(s)) or prepared[-1]
        made.output.rollouts = lambda *a: shown.append(a) or rollouts_shown(*a)
        metrics = made.train_step(0)
        for scored in source.kept:
            write(tmp / "dumped/replay", scored)
    (data,) = prepared
    data = data._replace(mini_batches=[], critic_mini_batches=[])
    return data, metrics, source.kept, [a[1] for a in shown]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("reward_model_wiring")
    write_tiny_hf(tmp / "hf", **MODEL)
    # The reward model is another model than the actor.
    write_tiny_reward_model(tmp / "reward", **{**MODEL, "num_layers": 3, "ffn": 64}, seed=5)
    return tmp


@pytest.fixture(scope="module")
def ranks(workers, place):
    """Of each rank its step."""
    return workers.run(2, step, place, False)


@pytest.fixture(scope="module")
def expected(place):
    """[response] -> (status, reward, score), by hand."""
    model, found = load_critic(str(place / "reward")), []
    for item in rollouts(1):
        if not is_pending(item):
            found.append((item.status, item.reward, item.score))
            continue
        tokens = torch.tensor([*item.rollout.prompt.token_ids, *item.rollout.token_ids])
        with torch.no_grad():
            hidden = model.model(tokens[None], use_cache=False).last_hidden_state[0, -1]
            score = float(model.lm_head(hidden))
        over = len(item.rollout.token_ids) - (LONGEST - BUFFER)
        punishment = min(max(over / BUFFER, 0), 1)
        status, reward = "correct" if score >= THRESHOLD else "wrong", score
        if not LOW <= score <= HIGH:
            status, reward, score = "failed", LOW, None
        found.append((status, reward - 0.5 * punishment, score))
    # Every kind is there, and scores are no constants.
    pending = [e for e, s in zip(found, rollouts(1)) if is_pending(s)]
    assert {"correct", "wrong", "failed"} == {status for status, *_ in pending}
    assert any(s.rollout.truncated for s in rollouts(1) if is_pending(s))
    assert stdev(reward for _, reward, _ in pending) > 0.2, pending
    return found


def check_batches(ranks, expected):
    rewards = [reward for _, reward, _ in expected]
    seen = []
    for data, *_ in ranks:
        batch = data.batch
        for i, position in enumerate(batch.positions.tolist()):
            seen.append(position)
            status, reward, _ = expected[position]
            assert float(batch.rewards[i]) == pytest.approx(reward, abs=1e-5)
            assert bool(batch.is_correct[i]) == (status == "correct")
            start = position - position % GROUP_SIZE
            group = rewards[start : start + GROUP_SIZE]
            advantage = (reward - fmean(group)) / (stdev(group) + 1e-6)
            own = batch.narrow(i, 1).advantages.tolist()
            assert own == pytest.approx([advantage] * len(own), abs=1e-3), position
    assert sorted(seen) == list(range(NUM_RESPONSES))


def test_rewards_and_advantages_are_of_the_scores(ranks, expected):
    check_batches(ranks, expected)


def test_every_rank_and_every_record_knows_the_verdicts(ranks, expected):
    from vapo_megatron.data.rollout import STATUSES

    for rank, (data, metrics, kept, shown) in enumerate(ranks):
        for summary in (data.summary, *(a for a in shown if a is not None)):
            if isinstance(summary, list):
                continue
            assert [STATUSES[s] for s in summary.statuses.tolist()] == [s for s, *_ in expected]
            assert summary.rewards.tolist() == pytest.approx(
                [reward for _, reward, _ in expected], abs=1e-5
            )
            assert torch.equal(summary.rewards, ranks[0][0].summary.rewards), "bit by bit"
        for scored in (data.scored, *kept, *shown):
            assert [on_rank(s) for s in scored] == [rank] * (NUM_RESPONSES // 2)
            for item in scored:
                status, reward, score = expected[item.rollout.position]
                assert item.status == status
                assert item.reward == pytest.approx(reward, abs=1e-5)
                assert item.score == (score and pytest.approx(score, abs=1e-5))
        of_status = [s for s, *_ in expected]
        fraction = of_status.count("correct") / NUM_RESPONSES
        assert metrics["reward/correct_fraction"] == pytest.approx(fraction)
        mean = fmean(reward for _, reward, _ in expected)
        assert metrics["reward/mean"] == pytest.approx(mean, abs=1e-5)


def test_a_replay_has_the_rewards_and_no_reward_model(ranks, workers, place, expected):
    assert not (place / "gone").exists()
    shutil.rmtree(place / "run", ignore_errors=True)
    check_batches(workers.run(2, step, place, True), expected)

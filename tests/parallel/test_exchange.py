"""Rollouts reach the ranks that train on them, whole and in order, over real gloo processes.

Does not exercise NCCL.
"""

import dataclasses
import math
from array import array

import pytest
import torch
import torch.distributed as dist

from vapo_megatron.config import ParallelConfig
from vapo_megatron.data.rollout import Prompt, Rollout, ScoredRollout
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.exchange import exchange, gather_summary

NUM = 11
WANTED = {1: [[3, 0, 7, 10, 1, 2, 9, 8, 4, 6, 5]], 2: [[3, 0, 7, 10, 1], [2, 9, 8, 4, 6, 5]]}


def problem(position: int) -> int:
    """Two responses per prompt; prompts are neither in order nor numbered from 0."""
    return 90 - 7 * (position // 2)


def own_prompt(position: int) -> tuple[int, ...] | None:
    """The critic's, of two prompts of three."""
    return tuple(range(500, 501 + 2 * (position % 3))) if position % 3 else None


def rollout(position: int, of_critic: bool = False) -> ScoredRollout:
    """Response `position`: prompt of 1 + position % 3 tokens, response of 1 + position % 4."""
    prompt = Prompt(problem(position), "", tuple(range(100, 101 + position % 3)), "")
    if of_critic:
        prompt = dataclasses.replace(prompt, critic_token_ids=own_prompt(position))
    length = 1 + position % 4
    item = Rollout(
        prompt=prompt,
        sample=0,
        position=position,
        token_ids=array("i", [position * 1000 + t for t in range(length)]),
        logprobs=array("f", [-position - 0.1 * t for t in range(length)]),
        truncated=position % 5 == 0,
        policy_version=0,
    )
    score = None if position % 4 else position / 8
    return ScoredRollout(item, "", "correct" if position % 2 else "wrong", 2.0 * position, score)


def run_exchange(tp_size: int, dp_size: int, of_critic: bool = False):
    place = groups.initialize(
        ParallelConfig(world_size=tp_size * dp_size, tensor_model_parallel_size=tp_size)
    )
    # Uneven shares in an odd order; the last of four ranks holds none, as a replica's second rank.
    shares = {1: [range(NUM)], 2: [[5, 1, 9], [0, 2, 3, 4, 6, 7, 8, 10]]}
    shares[4] = [*shares[2], [], []]
    local = [rollout(p, of_critic) for p in shares[place.world_size][place.rank]]
    summary = gather_summary(local, NUM)
    batch = exchange(local, summary, WANTED[dp_size], place)
    return place.dp_rank, summary, batch, shares[place.world_size]


def check(results, dp_size: int):
    for dp_rank, summary, batch, shares in results:
        held = {p: rank for rank, positions in enumerate(shares) for p in positions}
        assert summary.sources.tolist() == [held[p] for p in range(NUM)]
        assert summary.prompt_indices.tolist() == [problem(p) for p in range(NUM)]
        assert summary.truncated.tolist() == [p % 5 == 0 for p in range(NUM)]
        assert summary.rewards.tolist() == [2.0 * p for p in range(NUM)]
        assert summary.is_correct.tolist() == [p % 2 == 1 for p in range(NUM)]
        scores = [math.nan if p % 4 else p / 8 for p in range(NUM)]
        assert summary.scores.tolist() == pytest.approx(scores, nan_ok=True)
        wanted = WANTED[dp_size][dp_rank]
        expected = [rollout(p) for p in wanted]
        tokens = [t for e in expected for t in (*e.rollout.prompt.token_ids, *e.rollout.token_ids)]
        logprobs = [v for e in expected for v in e.rollout.logprobs]
        assert batch.tokens.tolist() == tokens
        assert torch.equal(batch.rollout_logprobs, torch.tensor(logprobs))
        assert batch.positions.tolist() == wanted
        assert batch.truncated.tolist() == [p % 5 == 0 for p in wanted]
        assert batch.rewards.tolist() == [2.0 * p for p in wanted]
        assert batch.is_correct.tolist() == [p % 2 == 1 for p in wanted]
        # Every token is trained on, stop tokens too, unless it is masked.
        assert batch.loss_mask.dtype == torch.bool
        assert batch.loss_mask.tolist() == [True] * len(logprobs)
        assert batch.response_lengths.tolist() == [1 + p % 4 for p in wanted]
        assert batch.sequence_lengths.tolist() == [2 + p % 3 + p % 4 for p in wanted]
        assert (batch.critic_prompts is None) == (summary.critic_prompt_lengths is None)


def test_one_process(workers):
    check(workers.run(1, run_exchange, 1, 1), 1)


def test_tensor_parallel_ranks_hold_the_same(workers):
    check(workers.run(2, run_exchange, 2, 1), 1)


def test_data_parallel_ranks_hold_their_own(workers):
    check(workers.run(2, run_exchange, 1, 2), 2)


def test_the_critics_prompts_travel_with_the_responses(workers):
    results = workers.run(2, run_exchange, 1, 2, True)
    check(results, 2)
    for dp_rank, summary, batch, _ in results:
        prompts = [own_prompt(p) or rollout(p).rollout.prompt.token_ids for p in range(NUM)]
        assert summary.critic_prompt_lengths.tolist() == list(map(len, prompts))
        # A sequence takes the longer of its prompts.
        longest = [max(1 + p % 3, len(own)) + 1 + p % 4 for p, own in enumerate(prompts)]
        assert summary.sequence_lengths == longest
        wanted = WANTED[2][dp_rank]
        assert batch.critic_prompt_lengths.tolist() == [len(prompts[p]) for p in wanted]
        assert batch.critic_prompts.tolist() == [t for p in wanted for t in prompts[p]]
        tokens = [t for p in wanted for t in (*prompts[p], *rollout(p).rollout.token_ids)]
        assert batch.for_critic().tokens.tolist() == tokens


def of_turns(position: int) -> ScoredRollout:
    """Every third response has a second turn behind an observation of two tokens; one earns."""
    item = rollout(position)
    r = item.rollout
    if position % 3 == 0:
        observation = array("i", [-position - 1, -position - 2])
        r = dataclasses.replace(r, inserted=((len(r.token_ids) - 1, observation),))
    earned = ((0, 0.5),) if position == 4 else ()
    return dataclasses.replace(item, rollout=r, token_rewards=earned)


def run_turns(dp_size: int):
    place = groups.initialize(ParallelConfig(world_size=dp_size))
    local = [of_turns(p) for p in range(dist.get_rank(), NUM, dp_size)]
    summary = gather_summary(local, NUM)
    return place.dp_rank, summary, exchange(local, summary, WANTED[dp_size], place)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_turns_travel_with_their_places_and_rewards(workers, dp_size):
    for dp_rank, summary, batch in workers.run(dp_size, run_turns, dp_size):
        every = [of_turns(p) for p in range(NUM)]
        assert summary.travelling == ["places", "logprobs", "token_rewards"]
        assert summary.sequence_lengths == [len(s.rollout.sequence) for s in every]
        assert summary.total_rewards.tolist() == [2.0 * p + 0.5 * (p == 4) for p in range(NUM)]
        wanted = [every[p] for p in WANTED[dp_size][dp_rank]]
        assert batch.tokens.tolist() == [t for s in wanted for t in s.rollout.sequence]
        assert batch.places.tolist() == [t for s in wanted for t in s.rollout.places]
        at = batch.places.long() + batch.per_token(batch.sequence_cu_seqlens[:-1].long())
        sampled = [t for s in wanted for t in s.rollout.token_ids]
        assert batch.tokens[at].tolist() == sampled, "an observation is no response token"
        assert batch.rollout_logprobs.tolist() == [x for s in wanted for x in s.rollout.logprobs]
        assert batch.token_rewards.tolist() == [
            0.5 * (s.rollout.position == 4 and t == 0)
            for s in wanted for t in range(len(s.rollout.token_ids))
        ]  # fmt: skip


def test_both(workers):
    check(workers.run(4, run_exchange, 2, 2), 2)

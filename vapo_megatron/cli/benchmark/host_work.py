"""Times a rank's CPU work per response token of a step, without sampling and verdicts."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.config import AlgorithmConfig
from vapo_megatron.data.batch import RolloutBatch
from vapo_megatron.data.packing import plan_step
from vapo_megatron.data.rollout import Prompt, Rollout, ScoredRollout
from vapo_megatron.parallel.exchange import exchange, gather_summary
from vapo_megatron.parallel.groups import AXES, Axis, Ranks
from vapo_megatron.parallel.minibatches import filled_in, make_microbatches, make_mini_batches
from vapo_megatron.roles.advantages import (
    with_advantages,
    with_loss_mask,
    with_policy_mask,
    with_positive_examples,
)
from vapo_megatron.run.step_metrics import logprob_difference, step_metrics

Result = TypeVar("Result")
PROMPT_TOKENS = 250
MINI_BATCH_SIZE = 512
MAX_TOKENS_PER_MICROBATCH = 24576
HIDDEN_SIZE = 3584


class Seconds(NamedTuple):
    """Of one part of the work."""

    wall: float
    cpu: float
    """Of all threads of the process; hardly affected by other processes."""


class _Clock:
    def __init__(self) -> None:
        self.parts: dict[str, Seconds] = {}

    def __call__(self, name: str, function: Callable[[], Result]) -> Result:
        wall, cpu = time.perf_counter(), time.process_time()
        result = function()
        self.parts[name] = Seconds(time.perf_counter() - wall, time.process_time() - cpu)
        return result


def measure(lengths: Tensor, seed: int) -> dict[str, Seconds]:
    """Run each part once, as StepTrainer.prepare and train_step do, with every technique on.

    Args:
        lengths: int64 [B], response tokens of one data-parallel rank.
        seed: of the numbers.
    """
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None
        alone = Axis(1, 0, world)
        ranks = Ranks(0, 1, dict.fromkeys(AXES, alone), vpp_size=1, last_stage_rank=0)
        return _measure(_responses(lengths, seed), ranks)
    finally:
        dist.destroy_process_group()


def show(lengths: Tensor, seed: int) -> None:
    """Print what `measure` finds, and the sum."""
    parts = measure(lengths, seed)
    parts["together"] = Seconds(*(sum(column) for column in zip(*parts.values())))
    print(
        f"{len(lengths)} responses, {int(lengths.sum())} tokens, {torch.get_num_threads()} CPU "
        "thread(s): seconds, and of CPU"
    )
    for name, seconds in parts.items():
        print(f"{name:<24}{seconds.wall:9.2f}{seconds.cpu:9.2f}")


def _responses(lengths: Tensor, seed: int) -> list[ScoredRollout]:
    """Random tokens and log-probabilities; responses share their memory."""
    generator = torch.Generator().manual_seed(seed)
    longest = int(lengths.max())
    tokens: Any = array("i", torch.randint(152_064, (longest,), generator=generator).tolist())
    logprobs: Any = array("f", (-torch.rand(longest, generator=generator)).tolist())
    prompt = Prompt(0, "", tokens[:PROMPT_TOKENS], "")
    correct = torch.rand(len(lengths), generator=generator) < 0.5
    return [
        ScoredRollout(
            Rollout(prompt, 0, i, tokens[:n], logprobs[:n], i % 8 == 0, 0),
            text="",
            status="correct" if is_correct else "wrong",
            reward=2.0 * is_correct - 1,
        )
        for i, (n, is_correct) in enumerate(zip(lengths.tolist(), correct.tolist()))
    ]


def _measure(scored: list[ScoredRollout], ranks: Ranks) -> dict[str, Seconds]:
    clock = _Clock()
    algorithm = AlgorithmConfig(
        overlong_filtering=True, sampler_correction="tis", advantage_whitening=True
    )
    summary = clock("summary", lambda: gather_summary(scored, len(scored)))
    plan = clock(
        "packing",
        lambda: plan_step(
            summary.sequence_lengths,
            mini_batch_size=MINI_BATCH_SIZE,
            dp_size=1,
            max_tokens_per_microbatch=MAX_TOKENS_PER_MICROBATCH,
            seed=0,
            attention_tokens=12 * HIDDEN_SIZE,
        ),
    )
    batch = clock("exchange", lambda: exchange(scored, summary, [plan.positions(0)], ranks))
    batch = clock("loss mask", lambda: with_loss_mask(batch, algorithm))
    sizes = plan.microbatch_sizes(0)
    microbatches = clock(
        "microbatches",
        lambda: make_microbatches(batch, itertools.chain(*sizes), multiple_of=1),
    )
    batch = _scored_by_models(batch)
    clock("sampler's difference", lambda: logprob_difference(batch, None, ranks))
    batch, _ = clock("sampler's correction", lambda: with_policy_mask(batch, algorithm, ranks))
    batch = clock(
        "lambdas, GAE, whitening", lambda: with_advantages(summary, batch, algorithm, ranks)
    )
    batch = clock("positive examples", lambda: with_positive_examples(batch, algorithm))
    mini_batches = clock(
        "mini-batches",
        lambda: make_mini_batches(filled_in(microbatches, batch), map(len, sizes), ranks),
    )
    # Once for each role that is updated.
    clock(
        "finite?",
        lambda: [m.batch.is_finite for m in 2 * [m for b in mini_batches for m in b.microbatches]],
    )
    clock("metrics", lambda: step_metrics(summary, batch, batch.rollout_logprobs, algorithm, ranks))
    return clock.parts


def _scored_by_models(batch: RolloutBatch) -> RolloutBatch:
    """The batch with values and the trainer's log-probabilities, near the engine's."""
    logprobs = batch.rollout_logprobs
    return batch.replace(old_logprobs=logprobs * 1.001, values=logprobs + 0.5)

"""Scores sampled responses, and checks all ground truths before a run starts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch
import torch.distributed as dist

from vapo_megatron.config import RewardConfig
from vapo_megatron.data.batch import Rollout, ScoredRollout
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.parallel.reduce import max_over_world
from vapo_megatron.reward.math_verifier import MathVerifier
from vapo_megatron.reward.shaping import shaped_reward
from vapo_megatron.reward.verifier import Verdict, Verifier, unparsable_answer

LARGEST_BATCH = 64
"""Responses that the verifier is given at once, so that a run that stops waits for few of them."""


class VerdictStream:
    """Lets the verifier judge, in a thread, while other responses are still sampled.

    The verifier gets what has finished since it was last called. Verdicts do not depend on how
    responses are divided into such batches, nor on the order in which they finish.
    """

    def __init__(self, verifier: Verifier | None) -> None:
        """Judge nothing yet. The verifier is None where no responses arrive."""
        self._verifier = verifier
        self._thread = ThreadPoolExecutor(1, "verifier")
        self._waiting: deque[Rollout] = deque()
        self._calls: list[Future[None]] = []
        self._verdicts: dict[int, Verdict] = {}

    def submit(self, rollout: Rollout) -> None:
        """Queue a finished response; returns immediately."""
        self._waiting.append(rollout)
        # One call for each response suffices; those that find none left do nothing.
        self._calls.append(self._thread.submit(self._judge_waiting))

    def _judge_waiting(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), LARGEST_BATCH))]
        if batch:
            assert self._verifier is not None, "responses are judged on a replica's first rank"
            answers = [r.prompt.answer for r in batch]
            verdicts = self._verifier.score([r.text for r in batch], answers)
            self._verdicts.update(zip((r.position for r in batch), verdicts, strict=True))

    def verdicts(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Wait for the verdicts on submitted responses, in the given order; raise its errors."""
        for call in self._calls:
            call.result()
        return [self._verdicts[r.position] for r in rollouts]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do not wait: after an error the batch being judged goes on until the verifier closes."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._verifier is not None:
            self._verifier.forget()


def score_rollouts(
    stream: VerdictStream,
    rollouts: Sequence[Rollout],
    reward: RewardConfig,
    max_response_tokens: int,
) -> list[ScoredRollout]:
    """Score this replica's responses, in their order, once the last verdict is there.

    Args:
        stream: to which they were submitted.
        rollouts: this replica's on its first rank, none elsewhere: no response counts twice.
        reward: turns a verdict into a number.
        max_response_tokens: the sampling limit, for the overlong penalty.
    """
    return [
        ScoredRollout(
            rollout,
            verdict.status,
            shaped_reward(
                verdict.is_correct,
                rollout.truncated,
                len(rollout.token_ids),
                reward,
                max_response_tokens,
            ),
        )
        for rollout, verdict in zip(rollouts, stream.verdicts(rollouts))
    ]


def start_verifier(
    reward: RewardConfig, datasets: Sequence[PromptDataset | None], tp_size: int
) -> MathVerifier | None:
    """Start the verifier, and refuse ground truths that it cannot parse. Collective.

    Args:
        reward: the verifier's settings.
        datasets: each replica checks its share of every one.
        tp_size: ranks of a vLLM replica.

    Returns:
        On the first rank of each replica a verifier, to be closed; None elsewhere.

    Raises:
        DataError: on every rank, naming the last such row of a file.
    """
    replica, rank_in_replica = divmod(dist.get_rank(), tp_size)
    verifier = None
    if rank_in_replica == 0:
        verifier = MathVerifier(reward.num_workers, reward.timeout_seconds)
        verifier.start()
    for dataset in filter(None, datasets):
        answers = dataset.answers
        found = -1
        if verifier is not None:
            share = range(replica, len(answers), dist.get_world_size() // tp_size)
            bad = verifier.unparsable_answers([answers[i] for i in share])
            found = share[bad[-1]] if bad else -1
        row = int(max_over_world(torch.tensor(float(found), dtype=torch.float64)))
        if row >= 0:
            raise unparsable_answer(dataset.path, row, answers[row])
    return verifier

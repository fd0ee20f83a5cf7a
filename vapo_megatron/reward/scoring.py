"""Scores sampled responses."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self

import torch
from torch import Tensor

from vapo_megatron.config import RewardConfig
from vapo_megatron.data.batch import StepSummary
from vapo_megatron.data.problems import Problem
from vapo_megatron.data.rollout import PENDING, STATUSES, Rollout, ScoredRollout
from vapo_megatron.reward.reward_model import Pending, reward_model_verdict
from vapo_megatron.reward.shaping import scored_verdict, shaped_reward
from vapo_megatron.reward.verifier import RunningVerifier, Verdict
from vapo_megatron.reward.verifiers import Verifiers

LARGEST_BATCH = 64
"""Responses that the verifier is given at once, so that a run that stops waits for few of them."""


class Judged(NamedTuple):
    """A response's text and the verdict on it."""

    text: str
    verdict: Verdict


class VerdictStream:
    """Decodes and judges responses, in a thread, while others are still sampled.

    The verifier gets what has finished since it was last called; a group at once, where it sees
    groups. Verdicts do not depend on how responses are divided into such batches, nor on the order
    in which they finish.
    """

    def __init__(
        self,
        verifier: RunningVerifier | None,
        decode: Callable[[Sequence[Sequence[int]]], list[str]],
        sizes: Mapping[int, int] | None = None,
    ) -> None:
        """Judge nothing yet.

        Args:
            verifier: None where no responses arrive.
            decode: token ids of responses to their texts; called in the thread.
            sizes: Rollout.first -> responses of the group, all of which arrive; None: no verifier
                sees groups.
        """
        self._sizes = sizes
        self._groups: dict[int, list[Rollout]] = {}
        self._verifier, self._decode = verifier, decode
        self._thread = ThreadPoolExecutor(1, "verifier")
        self._waiting: deque[Rollout] = deque()
        self._calls: list[Future[None]] = []
        self._pending: deque[tuple[list[Rollout], list[str], Iterable[Verdict]]] = deque()
        self._judged: dict[int, Judged] = {}

    def submit(self, rollout: Rollout) -> None:
        """Queue a finished response; returns immediately."""
        self._waiting.append(rollout)
        # One call for each response suffices; those that find none left do nothing.
        self._calls.append(self._thread.submit(self._judge_waiting))

    def _judge_waiting(self) -> None:
        some = [self._waiting.popleft() for _ in range(min(len(self._waiting), LARGEST_BATCH))]
        batch: list[Rollout] = []
        problems: list[Problem] = []
        for rollout in some:
            group = self._grouped(rollout)
            batch += group
            # One object for all, by which the verifier knows that they are a group.
            problems += [rollout.prompt.problem] * len(group)
        if batch:
            texts = self._decode([r.last_action for r in batch])
            self._pending.append((batch, texts, self._verdicts(batch, texts, problems)))

    def _verdicts(
        self, batch: Sequence[Rollout], texts: Sequence[str], problems: Sequence[Problem]
    ) -> Iterable[Verdict]:
        """Return an environment's own verdicts, and the verifier's where it has none."""
        assert self._verifier is not None, "responses are judged on a replica's first rank"
        given = [r.episode.verdict if r.episode else None for r in batch]
        asked = [i for i, verdict in enumerate(given) if verdict is None]
        judged = self._verifier.score([texts[i] for i in asked], [problems[i] for i in asked])
        if len(asked) == len(given):
            return judged
        rest = iter(judged)
        return (next(rest) if verdict is None else verdict for verdict in given)

    def _grouped(self, rollout: Rollout) -> list[Rollout]:
        """Return the response, or its group, of which it is the last; nothing while others miss."""
        verifier, first = self._verifier, rollout.first
        sees_group = isinstance(verifier, Verifiers) and verifier.sees_group(rollout.prompt.problem)
        if self._sizes is None or not sees_group:
            return [rollout]
        group = self._groups.setdefault(first, [])
        group.append(rollout)
        if len(group) < self._sizes[first]:
            return []
        del self._groups[first]
        return sorted(group, key=lambda r: r.position)

    def judged(self, rollouts: Sequence[Rollout]) -> list[Judged]:
        """Wait for the verdicts on submitted responses, in the given order; raise its errors."""
        for call in self._calls:
            call.result()
        assert not self._groups, "every response of a group arrives"
        while self._pending:
            for rollout, text, verdict in zip(*self._pending.popleft(), strict=True):
                self._judged[rollout.position] = Judged(text, verdict)
        return [self._judged[r.position] for r in rollouts]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do not wait: after an error what is being judged goes on until the verifier closes."""
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
    scored = []
    for rollout, (text, verdict) in zip(rollouts, stream.judged(rollouts), strict=True):
        earned = tuple((turn.end - 1, turn.reward) for turn in rollout.turns if turn.reward)
        if isinstance(verdict, Pending):
            scored.append(ScoredRollout(rollout, text, PENDING, math.nan, token_rewards=earned))
            continue
        verifier = rollout.prompt.problem.verifier or reward.verifier
        number = shaped_reward(
            verdict, rollout.truncated, len(rollout.token_ids), reward, max_response_tokens,
            verifier, is_paid=rollout.is_paid,
        )  # fmt: skip
        scored.append(
            ScoredRollout(
                rollout, text, verdict.status, number, verdict.score, verdict.note, verdict.metrics,
                earned,
            )
        )  # fmt: skip
    return scored


def with_scores(
    summary: StepSummary,
    scored: Sequence[ScoredRollout],
    scores: Tensor,
    reward: RewardConfig,
    max_response_tokens: int,
    verifiers: Mapping[int, str],
) -> tuple[StepSummary, list[ScoredRollout]]:
    """Give every pending response its verdict and reward.

    Args:
        summary: of all ranks' responses.
        scored: those that this rank sampled.
        scores: float32 [P*G] by position, the same on every rank; read where pending.
        reward: turns a score into a verdict and a reward.
        max_response_tokens: the sampling limit, for the overlong penalty.
        verifiers: Prompt.index -> the name of the verifier of those that have one.

    Returns:
        The summary, which is the same on every rank, and this rank's responses.
    """
    statuses, rewards = summary.statuses.clone(), summary.rewards.clone()
    of_verdicts = torch.full_like(rewards, math.nan)
    if summary.scores is not None:
        of_verdicts.copy_(summary.scores)
    own = {item.rollout.position: i for i, item in enumerate(scored)}
    found = list(scored)
    # Every rank updates the whole summary, but only its own responses.
    for position in summary.is_pending.nonzero().flatten().tolist():
        name = verifiers.get(int(summary.prompt_indices[position]), reward.verifier)
        verdict = scored_verdict(reward_model_verdict(float(scores[position])), reward, name)
        number = shaped_reward(
            verdict,
            bool(summary.truncated[position]),
            int(summary.response_lengths[position]),
            reward,
            max_response_tokens,
            name,
        )
        statuses[position], rewards[position] = STATUSES.index(verdict.status), number
        of_verdicts[position] = math.nan if verdict.score is None else verdict.score
        if position in own:
            i = own[position]
            found[i] = dataclasses.replace(
                found[i], status=verdict.status, reward=number, score=verdict.score,
                note=verdict.note,
            )  # fmt: skip
    assert torch.isfinite(rewards).all(), "every response has a reward"
    judged = dataclasses.replace(summary, statuses=statuses, rewards=rewards, scores=of_verdicts)
    return judged, found

"""Scores sampled responses, and checks all ground truths before a run starts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vapo_megatron.config import RewardConfig, RolloutConfig
from vapo_megatron.data.batch import StepSummary
from vapo_megatron.data.mixture import TrainingPrompts
from vapo_megatron.data.problems import Problem
from vapo_megatron.data.rollout import PENDING, STATUSES, Prompt, Rollout, ScoredRollout
from vapo_megatron.errors import ConfigError, UserError, tell
from vapo_megatron.parallel.reduce import any_rank, gather_objects
from vapo_megatron.reward.reward_model import Pending, reward_model_verdict
from vapo_megatron.reward.shaping import scored_verdict, shaped_reward
from vapo_megatron.reward.usable import settle
from vapo_megatron.reward.verifier import RunningVerifier, Verdict
from vapo_megatron.reward.verifiers import (
    Verifiers,
    check_reward_model_judges,
    reward_model_refusals,
)


class VerdictsFailed(UserError):
    """Too many of a step's verdicts failed or timed out."""


FAILED = ("failed", "timed_out")
"""Statuses that are no judgement."""
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
        group_size: int | None = None,
    ) -> None:
        """Judge nothing yet.

        Args:
            verifier: None where no responses arrive.
            decode: token ids of responses to their texts; called in the thread.
            group_size: consecutive positions that are a group, all of which arrive; None: no
                verifier sees groups.
        """
        self._group_size = group_size
        self._groups: dict[int, list[Rollout]] = {}
        self._verifier, self._decode = verifier, decode
        self._thread = ThreadPoolExecutor(1, "verifier")
        self._waiting: deque[Rollout] = deque()
        self._calls: list[Future[None]] = []
        self._begun: deque[tuple[list[Rollout], list[str], Iterable[Verdict]]] = deque()
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
            assert self._verifier is not None, "responses are judged on a replica's first rank"
            texts = self._decode([r.token_ids for r in batch])
            self._begun.append((batch, texts, self._verifier.score(texts, problems)))

    def _grouped(self, rollout: Rollout) -> list[Rollout]:
        """Return the response, or its group, of which it is the last; nothing while others miss."""
        size, verifier = self._group_size, self._verifier
        sees_group = isinstance(verifier, Verifiers) and verifier.sees_group(rollout.prompt.problem)
        if size is None or not sees_group:
            return [rollout]
        group = self._groups.setdefault(rollout.position // size, [])
        group.append(rollout)
        if len(group) < size:
            return []
        del self._groups[rollout.position // size]
        return sorted(group, key=lambda r: r.position)

    def judged(self, rollouts: Sequence[Rollout]) -> list[Judged]:
        """Wait for the verdicts on submitted responses, in the given order; raise its errors."""
        for call in self._calls:
            call.result()
        assert not self._groups, "every response of a group arrives"
        while self._begun:
            for rollout, text, verdict in zip(*self._begun.popleft(), strict=True):
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
        if isinstance(verdict, Pending):
            scored.append(ScoredRollout(rollout, text, PENDING, math.nan))
            continue
        verifier = rollout.prompt.problem.verifier or reward.verifier
        number = shaped_reward(
            verdict, rollout.truncated, len(rollout.token_ids), reward, max_response_tokens,
            verifier,
        )  # fmt: skip
        scored.append(
            ScoredRollout(
                rollout, text, verdict.status, number, verdict.score, verdict.note, verdict.metrics
            )
        )
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


def start_verifiers(
    reward: RewardConfig,
    training: TrainingPrompts | None,
    held_out: TrainingPrompts | None,
    tp_size: int,
    default: object | None = None,
    *,
    reward_hf_path: str | None = None,
    skip_unusable: bool = False,
) -> Verifiers | None:
    """Start the verifiers, and refuse problems that they cannot judge. Collective.

    Afterwards problems that hybrid judges name the verifier that was chosen, on every rank, and
    those left out are not drawn.

    Args:
        reward: the verifiers and their settings.
        training, held_out: each replica checks its share of both.
        tp_size: ranks of a vLLM replica.
        default: see Verifiers.
        reward_hf_path: of the reward model, which may judge the training data; None: none.
        skip_unusable: of data: leave such problems out and print how many.

    Returns:
        On the first rank of each replica the verifiers, to be closed; None elsewhere.

    Raises:
        UserError: on every rank: a verifier does not load, or does not judge a made-up response;
            the reward model would judge nothing; or names the last such row of a file.
    """
    replica, rank_in_replica = divmod(dist.get_rank(), tp_size)
    verifiers = None
    if rank_in_replica == 0:
        verifiers = Verifiers(reward, default)
        verifiers.start()
    refusals = reward_model_refusals(has_reward_model=reward_hf_path is not None)
    for dataset, refusal in zip((training, held_out), refusals, strict=True):
        if dataset is None:
            continue
        share = range(replica, len(dataset), dist.get_world_size() // tp_size)
        mistake, bad, chosen = "", dict[int, str](), dict[int, str]()
        if verifiers is not None:
            try:
                names, reasons = verifiers.examine([dataset.rows[i] for i in share], refusal)
                chosen = {share[i]: name for i, name in names.items()}
                bad = {share[i]: reason for i, reason in reasons.items()}
            except UserError as error:
                mistake = str(error)
        gathered = gather_objects((mistake, bad, chosen))
        if any(mistake for mistake, _, _ in gathered):
            raise ConfigError(max(mistake for mistake, _, _ in gathered))
        for _, found, chosen in gathered:
            dataset.assign(chosen)
            bad |= found
        lines = settle(dataset, bad, reward, skip=skip_unusable, has_default=default is not None)
        if dist.get_rank() == 0:
            for line in lines:
                tell(f"warning: {line}")
    if mistake := max(gather_objects(_trial(verifiers, training, held_out))):
        raise ConfigError(mistake)
    if training is not None and default is None:
        rows = [row for _, row in training.kept]
        check_reward_model_judges(reward, rows, training.path, reward_hf_path)
    return verifiers


def _trial(verifiers: Verifiers | None, *datasets: TrainingPrompts | None) -> str:
    """Try this rank's verifiers out; return what is wrong, or nothing."""
    if verifiers is None:
        return ""
    rows = (d.rows for d in datasets if d is not None)
    try:
        verifiers.try_out(itertools.chain.from_iterable(rows))
    except UserError as error:
        return str(error)
    return ""


def any_sees_groups(verifiers: RunningVerifier | None, rollout: RolloutConfig) -> bool:
    """Return whether any rank's verifiers see groups. Collective; raises as check_whole_groups."""
    sees_groups = any_rank(isinstance(verifiers, Verifiers) and verifiers.sees_groups())
    check_whole_groups(rollout, sees_groups=sees_groups)
    return sees_groups


def check_whole_groups(rollout: RolloutConfig, *, sees_groups: bool) -> None:
    """Refuse a verifier that sees groups where their responses end in different steps.

    Raises:
        ConfigError: names rollout.carry_over_groups.
    """
    if sees_groups and rollout.carry_over_groups:
        raise ConfigError(
            f"rollout.carry_over_groups={rollout.carry_over_groups} ends the responses of a group "
            "in different steps, but a verifier sees whole groups; set it to 0, or judge responses "
            "one by one"
        )


def check_verdicts(
    summary: StepSummary,
    reward: RewardConfig,
    scored: Sequence[ScoredRollout],
    prompts: TrainingPrompts | None,
    group: ProcessGroup | None = None,
) -> None:
    """Stop a run whose verifier does not work; the same on every rank.

    Args:
        summary: of all ranks' responses; no verdict may be pending.
        reward: the limits.
        scored: this rank's responses.
        prompts: what the responses' prompts are of; None: not known.
        group: of all ranks that have responses; None: the world.

    Raises:
        VerdictsFailed: more of the step's verdicts failed or timed out than
            reward.max_failed_fraction allows. Quotes the first.
    """
    assert not summary.is_pending.any(), "the reward model has scored what it judges"
    counts = summary.statuses.bincount(minlength=len(STATUSES)).tolist()
    by_status = dict(zip(STATUSES, counts))
    if not _are_too_many(by_status, reward):
        return
    failed = ((s.rollout.position, s) for s in scored if s.status in FAILED)
    position, own = min(failed, key=lambda found: found[0], default=(math.inf, None))
    said = "" if own is None else failure(own.rollout.prompt, own.status, own.note, reward, prompts)
    check_failures(by_status, reward, min(gather_objects((position, said), group))[1])


def place(dataset: TrainingPrompts | None, index: int) -> str:
    """Say which row of which file a Prompt.index is; None: the file is not known."""
    if dataset is None:
        return f"problem {index}"
    path, row = dataset.row(index)
    return f"row {row} (from 0) of {path}"


def failure(
    prompt: Prompt, status: str, note: str, reward: RewardConfig, prompts: TrainingPrompts | None
) -> str:
    """Say which verifier failed on which row of which file, and how."""
    verifier = prompt.problem.verifier or reward.verifier
    what = note or status.replace("_", " ")
    return f"the verifier {verifier} on {place(prompts, prompt.index)}: {what}"


def check_failures(counts: Mapping[str, int], reward: RewardConfig, first: str) -> None:
    """Refuse verdicts of a verifier that does not work; counts: of each status, first: see failure.

    Raises:
        VerdictsFailed: see check_verdicts.
    """
    if _are_too_many(counts, reward):
        failed, timed_out = (counts[status] for status in FAILED)
        raise VerdictsFailed(
            f"{failed} verdicts failed and {timed_out} timed out, of {sum(counts.values())}: more "
            f"than reward.max_failed_fraction={reward.max_failed_fraction:g} allows; the first: "
            f"{first}; correct the verifier, or raise reward.timeout_seconds="
            f"{reward.timeout_seconds:g}, reward.memory_gb={reward.memory_gb:g} or the fraction"
        )


def _are_too_many(counts: Mapping[str, int], reward: RewardConfig) -> bool:
    return sum(counts[s] for s in FAILED) > reward.max_failed_fraction * sum(counts.values())

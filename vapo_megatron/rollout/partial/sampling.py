"""Partial rollouts: samples steps whose unfinished groups resume later, and checkpoints them.

All ranks of a replica track its groups in flight, because vLLM needs the same requests on each;
verdicts are on its first rank. The state before the latest step is kept too, because a checkpoint
may be written before that step is trained on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vapo_megatron.algorithm.group_sampling import repeat_for_group
from vapo_megatron.config import AlgorithmConfig, RewardConfig, RolloutConfig
from vapo_megatron.config.phases import GENERATION, REWARD
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.data.rollout import Rollout, ScoredRollout
from vapo_megatron.reward.scoring import VerdictStream, score_rollouts
from vapo_megatron.rollout.partial.files import (
    PARTIAL,
    Group,
    Response,
    num_groups,
    packed,
    partial_files,
    unpacked,
)
from vapo_megatron.rollout.partial.tally import Tally, num_started, shares
from vapo_megatron.rollout.requests import Request, SamplingSettings, Work, assign, start_groups
from vapo_megatron.rollout.source import StepRequest

if TYPE_CHECKING:
    from vapo_megatron.rollout.vllm.engine import RolloutEngine


@dataclasses.dataclass(frozen=True)
class Flight:
    """What is in flight between two steps."""

    groups: tuple[Group, ...] = ()
    """Of this replica, those started first coming first."""
    counts: tuple[int, ...] = ()
    """Groups of every replica."""
    num_prompts: int = 0
    """Prompts that all replicas have started in the step before."""


class PartialSampling:
    """The groups of one replica, as one of its ranks has them."""

    def __init__(
        self,
        engine: RolloutEngine,
        dataset: PromptDataset,
        *,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        reward: RewardConfig,
        settings: SamplingSettings,
    ) -> None:
        """Begin with nothing in flight."""
        self._engine, self._dataset, self._settings = engine, dataset, settings
        self._rollout, self._algorithm, self._reward = rollout, algorithm, reward
        replicas = engine.num_replicas
        self._shares = shares(algorithm.num_prompts, replicas)
        self._extras = shares(rollout.carry_over_groups, replicas)
        self._after: dict[int, Flight] = {0: Flight((), (0,) * replicas)}
        """By the number of steps done, of the latest two."""

    def share(self, asked: StepRequest, stream: VerdictStream) -> list[ScoredRollout]:
        """Sample until this replica's share of a step is finished, without communication.

        Returns:
            Its responses, on its first rank.

        Raises:
            RuntimeError: vLLM gave a response up.
            Stopped: there was no time for it.
        """
        step, replica = asked.step, self._engine.replica
        before = self._after[step]
        started = self._num_started(step, before.counts)
        groups = [*before.groups, *self._new_groups(asked, started)]
        tally = Tally(
            [group.started for group in groups],
            [group.missing for group in groups],
            step=step,
            share=self._shares[replica],
            max_lag=self._rollout.max_lag,
        )
        groups = self._sampled(groups, asked, tally, stream)
        selected = tally.selected()
        # Every replica's groups are of one size: others' positions are known without asking them.
        first = sum(self._shares[:replica]) * self._algorithm.group_size
        handed_over = [response.scored for i in selected for response in groups[i].responses]
        scored = [
            dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, position=position))
            for position, item in enumerate(handed_over, first)
            if item is not None
        ]
        left = tuple(group for i, group in enumerate(groups) if i not in selected)
        parts = zip(before.counts, started, self._shares, strict=True)
        counts = tuple(had + new - gone for had, new, gone in parts)
        self._after = {step: before, step + 1: Flight(left, counts, sum(started))}
        return scored

    def num_prompts(self, step: int) -> int:
        """Return how many prompts all replicas have started in the latest step."""
        return self._after[step + 1].num_prompts

    def _num_started(self, step: int, counts: Sequence[int]) -> list[int]:
        """Return how many groups each replica starts."""
        left = self._algorithm.num_steps - step
        parts = zip(counts, self._shares, self._extras, strict=True)
        return [num_started(count, share, extra, left) for count, share, extra in parts]

    def _new_groups(self, asked: StepRequest, started: Sequence[int]) -> list[Group]:
        """Draw all replicas' prompts, and start this one's part of them."""
        size, replica = self._algorithm.group_size, self._engine.replica
        groups = start_groups(
            repeat_for_group(self._dataset.next(sum(started), asked.step), size),
            [size] * sum(started), seed=self._engine.seed, step=asked.step,
            role=self._settings.seed_role, policy_version=asked.policy_version,
        )  # fmt: skip
        first = sum(started[:replica])
        return [
            Group(asked.step, tuple(Response(r.rollout, r.seed) for r in group))
            for group in groups[first : first + started[replica]]
        ]

    def _sampled(
        self, groups: Sequence[Group], asked: StepRequest, tally: Tally, stream: VerdictStream
    ) -> list[Group]:
        """Return the groups once it is enough: with more tokens, and verdicts on the finished."""
        engine, phase = self._engine, asked.phase
        held = [response for group in groups for response in group.responses]
        number = [i for i, group in enumerate(groups) for _ in group.responses]
        # A position here is the index in `held`, not that in the step.
        missing = [
            Request(dataclasses.replace(response.rollout, position=at), response.seed)
            for at, response in enumerate(held)
            if not response.is_finished
        ]
        finished: list[Rollout] = []

        def on_finished(rollout: Rollout) -> None:
            finished.append(rollout)
            tally.finished(number[rollout.position])
            if engine.keeps_rollouts:
                stream.submit(rollout)

        # All requests are handed over at once; none follow.
        once = iter([missing])
        work = Work(lambda room: next(once, []), on_finished, len(missing), tally.is_enough)
        with phase(GENERATION) as show:
            interrupted = engine.run(
                work, self._settings, asked.policy_version, show, asked.has_time
            )
        # A request that vLLM aborts itself is neither finished nor interrupted.
        if lost := len(missing) - len(finished) - len(interrupted):
            raise RuntimeError(f"vLLM gave up {lost} of {len(missing)} responses")
        with phase(REWARD):
            judged = finished if engine.keeps_rollouts else []
            limit = self._settings.max_response_tokens
            scored = score_rollouts(stream, judged, self._reward, limit)
        verdicts = {item.rollout.position: item for item in scored}
        for rollout in interrupted:
            held[rollout.position] = Response(rollout, held[rollout.position].seed)
        for rollout in finished:
            at = rollout.position
            held[at] = Response(rollout, held[at].seed, True, verdicts.get(at))
        rest = iter(held)
        return [
            Group(group.started, tuple(itertools.islice(rest, len(group.responses))))
            for group in groups
        ]

    def files(self, done: int) -> Iterator[tuple[str, bytes]]:
        """Yield name in the checkpoint and content of this rank's file after `done` steps, if any.

        done: all steps that have been sampled, or all but the latest.
        """
        groups = self._after[done].groups
        if groups and self._engine.keeps_rollouts:
            yield f"{PARTIAL}/replica_{self._engine.replica:05d}.safetensors", packed(groups, done)

    def load(self, done: int, checkpoint: Path) -> None:
        """Resume a checkpoint's groups in flight, divided among this run's replicas.

        Args:
            done: steps that have been sampled.
            checkpoint: see check_partial.
        """
        keeps, prompt = self._engine.keeps_rollouts, self._dataset.prompt
        counts = {file: num_groups(file) for file in partial_files(checkpoint)}
        parts = assign(sum(counts.values()), self._engine.num_replicas)
        mine, groups, first = parts[self._engine.replica], list[Group](), 0
        for file, count in counts.items():
            start, stop = max(mine.start - first, 0), max(mine.stop - first, 0)
            if start < min(stop, count):
                groups += unpacked(file, prompt, keeps=keeps)[start:stop]
            first += count
        groups.sort(key=lambda group: group.started)
        self._after = {done: Flight(tuple(groups), tuple(map(len, parts)))}

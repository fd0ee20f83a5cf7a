"""Samples steps whose groups may go on in later ones, and keeps those in a checkpoint.

    step_000010/in_flight/carried/replica_00000.safetensors

All ranks of a replica have its groups in flight, because all ask vLLM for the same; verdicts are on
its first rank. What was in flight before the latest step is kept, because that step may not be
trained on before the next checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vapo_megatron.algorithm.group_sampling import repeat_for_group
from vapo_megatron.config import AlgorithmConfig, RewardConfig, RolloutConfig
from vapo_megatron.config.phases import GENERATION, REWARD
from vapo_megatron.data.mixture import TrainingPrompts
from vapo_megatron.data.rollout import Prompt, Rollout, ScoredRollout
from vapo_megatron.errors import CheckpointError
from vapo_megatron.reward.scoring import VerdictStream, score_rollouts
from vapo_megatron.rollout.carry_over import Tally, num_begun, shares
from vapo_megatron.rollout.dump import FileHeader, read_arrays, read_header, step_bytes
from vapo_megatron.rollout.in_flight import IN_FLIGHT, sampled_steps
from vapo_megatron.rollout.requests import SamplingSettings, assign, request_seeds
from vapo_megatron.rollout.source import HasTime, Phase

if TYPE_CHECKING:
    from vapo_megatron.rollout.vllm.engine import RolloutEngine

CARRIED = f"{IN_FLIGHT}/carried"
"""Directory in a checkpoint: groups that its steps have begun and not trained on."""


@dataclasses.dataclass(frozen=True)
class Response:
    """One response of a group in flight."""

    rollout: Rollout
    """Its position is of no meaning between steps."""
    seed: int
    """Of its first token."""
    is_whole: bool = False
    scored: ScoredRollout | None = None
    """Once it is whole, on the rank that judges."""


@dataclasses.dataclass(frozen=True)
class Group:
    """All responses to a prompt, in flight."""

    begun: int
    """The step, from 0."""
    responses: tuple[Response, ...]


@dataclasses.dataclass(frozen=True)
class Flight:
    """What is in flight between two steps."""

    groups: tuple[Group, ...] = ()
    """Of this replica, those begun first coming first."""
    counts: tuple[int, ...] = ()
    """Groups of every replica."""
    drawn: int = 0
    """Prompts that all replicas have begun in the step before."""


class CarriedSampling:
    """The groups of one replica, as one of its ranks has them."""

    def __init__(
        self,
        engine: RolloutEngine,
        dataset: TrainingPrompts,
        *,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        reward: RewardConfig,
        settings: SamplingSettings,
        seed: int,
    ) -> None:
        """Begin with nothing in flight."""
        self._engine, self._dataset, self._settings = engine, dataset, settings
        self._rollout, self._algorithm, self._reward = rollout, algorithm, reward
        self._seed = seed
        replicas = engine.num_replicas
        self._shares = shares(algorithm.num_prompts, replicas)
        self._extras = shares(rollout.carry_over_groups, replicas)
        self._after: dict[int, Flight] = {0: Flight((), (0,) * replicas)}
        """By the number of steps done, of the latest two."""

    def share(
        self,
        step: int,
        policy_version: int,
        phase: Phase,
        has_time: HasTime | None,
        stream: VerdictStream,
    ) -> list[ScoredRollout]:
        """Sample until this replica's share of a step is whole, without communication.

        Returns:
            Its responses, on its first rank.

        Raises:
            Stopped: there was no time for it.
        """
        size, replica = self._algorithm.group_size, self._engine.replica
        before = self._after[step]
        begun = self._begun(step, before.counts)
        groups = [*before.groups, *self._new_groups(step, policy_version, begun)]
        tally = Tally(
            [g.begun for g in groups],
            [sum(not r.is_whole for r in g.responses) for g in groups],
            step=step,
            share=self._shares[replica],
            max_lag=self._rollout.max_lag,
        )
        held = {
            i * size + j: _placed(response, i * size + j)
            for i, group in enumerate(groups)
            for j, response in enumerate(group.responses)
        }
        self._go_on(held, policy_version, phase, has_time, tally, stream)
        taken = tally.taken()
        groups = [
            Group(group.begun, tuple(held[i * size + j] for j in range(size)))
            for i, group in enumerate(groups)
        ]
        first = assign(self._algorithm.responses_per_step, len(self._shares), size)[replica].start
        scored = [
            _scored_at(response, first + at * size + j)
            for at, i in enumerate(taken)
            for j, response in enumerate(groups[i].responses)
            if response.scored is not None
        ]
        left = tuple(group for i, group in enumerate(groups) if i not in taken)
        counts = (a + b - c for a, b, c in zip(before.counts, begun, self._shares, strict=True))
        self._after = {step: before, step + 1: Flight(left, tuple(counts), sum(begun))}
        return scored

    def drawn(self, step: int) -> int:
        """Return how many prompts all replicas have begun in the latest step."""
        return self._after[step + 1].drawn

    def _begun(self, step: int, counts: Sequence[int]) -> list[int]:
        """Return how many groups each replica begins."""
        left = self._algorithm.num_steps - step
        parts = zip(counts, self._shares, self._extras, strict=True)
        return [num_begun(count, share, extra, left) for count, share, extra in parts]

    def _new_groups(self, step: int, policy_version: int, begun: Sequence[int]) -> list[Group]:
        """Draw all replicas' prompts, and begin this one's part of them."""
        size, replica = self._algorithm.group_size, self._engine.replica
        prompts = repeat_for_group(self._dataset.next(sum(begun), step), size)
        role = self._settings.seed_role
        seeds = request_seeds(prompts, size, seed=self._seed, step=step, role=role)
        first = sum(begun[:replica])
        return [
            Group(
                step,
                tuple(
                    Response(Rollout.begun(prompts[p], p % size, p, policy_version), seeds[p])
                    for p in range(number * size, (number + 1) * size)
                ),
            )
            for number in range(first, first + begun[replica])
        ]

    def _go_on(
        self,
        held: dict[int, Response],
        policy_version: int,
        phase: Phase,
        has_time: HasTime | None,
        tally: Tally,
        stream: VerdictStream,
    ) -> None:
        """Sample at what is not whole, judge what gets whole, and put both into `held`."""
        size, engine = self._algorithm.group_size, self._engine
        ended: list[Rollout] = []

        def on_finished(rollout: Rollout) -> None:
            ended.append(rollout)
            tally.finished(rollout.position // size)
            if engine.keeps_rollouts:
                stream.submit(rollout)

        missing = [response for response in held.values() if not response.is_whole]
        with phase(GENERATION) as show:
            cut = engine.go_on(
                [r.rollout for r in missing], [r.seed for r in missing],
                self._settings, policy_version, on_finished, tally.is_enough, show, has_time,
            )  # fmt: skip
        with phase(REWARD):
            judged = ended if engine.keeps_rollouts else []
            limit = self._settings.max_response_tokens
            scored = score_rollouts(stream, judged, self._reward, limit)
        verdicts = {item.rollout.position: item for item in scored}
        for rollout in cut:
            at = rollout.position
            held[at] = dataclasses.replace(held[at], rollout=rollout)
        for rollout in ended:
            at = rollout.position
            held[at] = Response(rollout, held[at].seed, True, verdicts.get(at))

    def files(self, done: int) -> Iterator[tuple[str, bytes]]:
        """Yield name in the checkpoint and content of this rank's file after `done` steps, if any.

        done: all steps that have been sampled, or all but the latest.
        """
        groups = self._after[done].groups
        if groups and self._engine.keeps_rollouts:
            name = f"{CARRIED}/replica_{self._engine.replica:05d}.safetensors"
            yield name, packed(groups, done, self._algorithm.group_size)

    def load(self, done: int, checkpoint: Path) -> None:
        """Go on with what a checkpoint has in flight, divided among this run's replicas.

        Args:
            done: steps that have been sampled.
            checkpoint: see check_carried.
        """
        size, held = self._algorithm.group_size, carried_files(checkpoint)
        total = sum(header.responses for header in held.values()) // size
        parts = assign(total, self._engine.num_replicas)
        mine, groups, first = parts[self._engine.replica], list[Group](), 0
        for file, header in held.items():
            numbers = range(first, first + header.responses // size)
            first = numbers.stop
            if set(numbers) & set(mine):
                keeps = self._engine.keeps_rollouts
                of_file = zip(numbers, unpacked(file, self._dataset.prompt, keeps=keeps))
                groups += [group for number, group in of_file if number in mine]
        groups.sort(key=lambda group: group.begun)
        self._after = {done: Flight(tuple(groups), tuple(map(len, parts)))}


def carried_files(checkpoint: Path) -> dict[Path, FileHeader]:
    """Return a checkpoint's files of groups in flight, with their headers."""
    return {f: read_header(f) for f in sorted((checkpoint / CARRIED).glob("*.safetensors"))}


def check_carried(
    checkpoint: Path | None, rollout: RolloutConfig, algorithm: AlgorithmConfig
) -> None:
    """Check that a run loses nothing of what a checkpoint has in flight.

    Raises:
        CheckpointError: it would not go on with its groups, or would not train on those that have
            been in flight since; or they are of another size, or more than a step has.
    """
    held = {} if checkpoint is None else carried_files(checkpoint)
    if checkpoint is None or not held:
        return
    if not rollout.carry_over_groups:
        raise CheckpointError(
            f"{checkpoint} has groups in flight, which a run with rollout.carry_over_groups=0 "
            "would lose; set it to 1 or more"
        )
    if not rollout.is_apart and sampled_steps(checkpoint):
        raise CheckpointError(
            f"{checkpoint} has responses of later steps, among them of groups that went on, which "
            "a run with rollout.placement=colocated would lose; set it to disaggregated"
        )
    size, num_prompts = algorithm.group_size, algorithm.num_prompts
    found, total = {h.group_size for h in held.values()}, sum(h.responses for h in held.values())
    if found != {size} or total > num_prompts * size:
        raise CheckpointError(
            f"{checkpoint} has {total} responses in flight, in groups of {max(found)}, but a step "
            f"has {num_prompts} groups of {size}; restore algorithm.responses_per_step and "
            "group_size"
        )


def packed(groups: Sequence[Group], done: int, group_size: int) -> bytes:
    """Return the file of a replica's groups, of which there are some."""
    responses = [response for group in groups for response in group.responses]
    scored = [r.scored or ScoredRollout(r.rollout, "", "failed", 0.0) for r in responses]
    notes = [item.note.encode("utf-8", "surrogatepass") for item in scored]
    scores = [np.nan if item.score is None else item.score for item in scored]
    more = {
        "begun": np.array([group.begun for group in groups], np.int64),
        "seed": np.array([r.seed for r in responses], np.int64),
        "is_whole": np.array([r.is_whole for r in responses], np.bool_),
        "score": np.array(scores, np.float64),
        "note": np.frombuffer(b"".join(notes), np.uint8),
        "note_lengths": np.array(list(map(len, notes)), np.int64),
    }
    return step_bytes(scored, done, num_responses=len(scored), group_size=group_size, more=more)


def unpacked(file: Path, prompt: Callable[[int], Prompt], *, keeps: bool) -> list[Group]:
    """Return a file's groups.

    Args:
        file: which has of each prompt less than a verifier may ask for.
        prompt: Prompt.index -> the data set's.
        keeps: on the rank that has the verdicts.

    Raises:
        DataError: the file is damaged.
    """
    scored, arrays = read_arrays(file)
    size = len(scored) // len(arrays["begun"])
    notes = np.split(arrays["note"], arrays["note_lengths"].cumsum()[:-1])
    responses = []
    for i, item in enumerate(scored):
        is_whole, score = bool(arrays["is_whole"][i]), float(arrays["score"][i])
        rollout = dataclasses.replace(item.rollout, prompt=prompt(item.rollout.prompt.index))
        verdict = dataclasses.replace(
            item,
            rollout=rollout,
            score=None if np.isnan(score) else score,
            note=notes[i].tobytes().decode("utf-8", "surrogatepass"),
        )
        kept = verdict if is_whole and keeps else None
        responses.append(Response(rollout, int(arrays["seed"][i]), is_whole, kept))
    return [
        Group(int(begun), tuple(responses[i * size : (i + 1) * size]))
        for i, begun in enumerate(arrays["begun"])
    ]


def _placed(response: Response, position: int) -> Response:
    rollout = dataclasses.replace(response.rollout, position=position)
    return dataclasses.replace(response, rollout=rollout)


def _scored_at(response: Response, position: int) -> ScoredRollout:
    assert response.scored is not None
    rollout = dataclasses.replace(response.rollout, position=position)
    return dataclasses.replace(response.scored, rollout=rollout)

"""Per-rank checkpoint files of responses that no step has trained on yet.

With rollout.lag, responses of steps sampled ahead; with carry_over_groups, unfinished groups:

    step_000010/in_flight/step_000011/rank_00000.safetensors
    step_000010/in_flight/carried/replica_00000.safetensors
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from vapo_megatron.config import AlgorithmConfig, RolloutConfig
from vapo_megatron.data.rollout import Prompt, Rollout, ScoredRollout
from vapo_megatron.data.storage import HashedFile
from vapo_megatron.errors import CheckpointError
from vapo_megatron.rollout.dump import FileHeader, read_array, read_arrays, read_header, step_bytes

IN_FLIGHT = "in_flight"
"""Their directory in a checkpoint."""
PARTIAL = f"{IN_FLIGHT}/carried"
"""That of groups that its steps have started and not trained on."""


@dataclasses.dataclass(frozen=True)
class Response:
    """One response of a group in flight."""

    rollout: Rollout
    """Its position is of no meaning between steps."""
    seed: int
    """Of its first token."""
    is_finished: bool = False
    scored: ScoredRollout | None = None
    """Once it is finished, on the rank that judges."""


@dataclasses.dataclass(frozen=True)
class Group:
    """All responses to a prompt, in flight."""

    started: int
    """The step, from 0."""
    responses: tuple[Response, ...]

    @property
    def missing(self) -> int:
        """Responses that are unfinished."""
        return sum(not response.is_finished for response in self.responses)


def packed(groups: Sequence[Group], done: int) -> bytes:
    """Return the file of a replica's groups, of which there are some, after `done` steps."""
    responses = [response for group in groups for response in group.responses]
    scored = [r.scored or ScoredRollout(r.rollout, "", "failed", 0.0) for r in responses]
    notes = [item.note.encode("utf-8", "surrogatepass") for item in scored]
    scores = [np.nan if item.score is None else item.score for item in scored]
    more = {
        "begun": np.array([group.started for group in groups], np.int64),
        "seed": np.array([r.seed for r in responses], np.int64),
        "is_whole": np.array([r.is_finished for r in responses], np.bool_),
        "score": np.array(scores, np.float64),
        "note": np.frombuffer(b"".join(notes), np.uint8),
        "note_lengths": np.array(list(map(len, notes)), np.int64),
    }
    size, *others = {len(group.responses) for group in groups}
    return step_bytes(
        scored, done, num_responses=len(scored), group_size=0 if others else size, more=more
    )


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
    notes = np.split(arrays["note"], arrays["note_lengths"].cumsum()[:-1])
    groups: list[list[Response]] = []
    for i, item in enumerate(scored):
        is_finished, score = bool(arrays["is_whole"][i]), float(arrays["score"][i])
        rollout = dataclasses.replace(item.rollout, prompt=prompt(item.rollout.prompt.index))
        verdict = dataclasses.replace(
            item,
            rollout=rollout,
            score=None if np.isnan(score) else score,
            note=notes[i].tobytes().decode("utf-8", "surrogatepass"),
        )
        kept = verdict if is_finished and keeps else None
        if rollout.sample == 0:
            groups.append([])
        groups[-1].append(Response(rollout, int(arrays["seed"][i]), is_finished, kept))
    started = arrays["begun"].tolist()
    return [Group(at, tuple(some)) for at, some in zip(started, groups, strict=True)]


def partial_files(checkpoint: Path) -> dict[Path, FileHeader]:
    """Return a checkpoint's files of groups in flight, with their headers."""
    return {f: read_header(f) for f in sorted((checkpoint / PARTIAL).glob("*.safetensors"))}


def num_groups(file: Path) -> int:
    """Return how many groups a file has. Raises DataError: the file is damaged."""
    started = read_array(file, "begun")
    return 0 if started is None else len(started)


def check_partial(
    checkpoint: Path | None, rollout: RolloutConfig, algorithm: AlgorithmConfig
) -> None:
    """Check that a resumed run keeps all responses that a checkpoint has in flight.

    Raises:
        CheckpointError: it would not go on with its groups, or would not train on those that have
            been in flight since; or they are of another size, or more than a step has.
    """
    held = {} if checkpoint is None else partial_files(checkpoint)
    if checkpoint is None or not held:
        return
    if not rollout.carry_over_groups:
        raise CheckpointError(
            f"{checkpoint} has groups in flight, which a run with rollout.carry_over_groups=0 "
            "would lose; set it to 1 or more"
        )
    if not rollout.is_disaggregated and sampled_steps(checkpoint):
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


def sampled_steps(checkpoint: Path) -> list[Path]:
    """Return the directories of steps that had been sampled and not trained on, in order."""
    return sorted((checkpoint / IN_FLIGHT).glob("step_*"))


Written = tuple[str, dict[str, str]]
"""Of one rank: what went wrong, or nothing; and the SHA-256 of each file by its name."""


def write_files(checkpoint: Path, files: Iterable[tuple[str, bytes]]) -> Written:
    """Write a rank's files, given by name and content, of which one at a time is made."""
    sums: dict[str, str] = {}
    try:
        for name, content in files:
            with HashedFile(checkpoint / name) as out:
                out.write(content)
            sums[name] = out.sha256
    except OSError as error:
        return error.strerror or str(error), sums
    return "", sums


def all_sums(written: Sequence[Written], checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of all ranks' files by name.

    Raises:
        CheckpointError: one of them could not write.
    """
    if problem := next((problem for problem, _ in written if problem), ""):
        raise CheckpointError(f"{checkpoint}: responses cannot be written: {problem}; fix that")
    return {name: digest for _, sums in written for name, digest in sums.items()}

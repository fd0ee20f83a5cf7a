"""Files of responses in a checkpoint that no step has trained on yet, each rank its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from vapo_megatron.data.storage import HashedFile
from vapo_megatron.errors import CheckpointError

IN_FLIGHT = "in_flight"
"""Their directory in a checkpoint."""


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

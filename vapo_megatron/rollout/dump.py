"""Scored rollouts in binary files, from which a run can be replayed without an engine.

    RUN/replay/step_000001/rank_00000.safetensors

Each rank that sampled writes its own file. The directory is renamed into place once it is complete,
and only the last `logging.dump_steps` are kept. A response token takes 8 bytes (int32 id, float32
log-probability) and about 4 of text, each prompt is written once: 8192 responses of 5,000 tokens
take 0.5 GB a step, over all files.

Positions are global, so a dump can be read by any number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vapo_megatron.data.disk_errors import writing
from vapo_megatron.data.rollout import ScoredRollout
from vapo_megatron.data.storage import replace_directory
from vapo_megatron.errors import DataError
from vapo_megatron.rollout.arrays import pack, unpack

_FORMAT = "vapo_megatron rollouts 1"
_STEP = re.compile(r"step_(\d{6,})")


@dataclasses.dataclass(frozen=True)
class FileHeader:
    """A file's metadata; the last three fields are the same in all files of a step."""

    first_position: int
    responses: int
    longest_sequence: int
    """Prompt and response together, in tokens."""
    largest_token_id: int
    crc32: int
    """Of all arrays."""
    step: int
    """From 1, as in metrics.jsonl."""
    num_responses: int
    """Of the whole step."""
    group_size: int
    """Responses of each group; 0: groups differ in size."""


def write_step(
    root: Path,
    step: int,
    scored: Sequence[ScoredRollout],
    *,
    num_responses: int,
    group_size: int,
    keep_last: int,
) -> None:
    """Write one step and delete all but the last `keep_last`. Collective over all ranks.

    Args:
        root: the run's replay directory, on a file system that all ranks share.
        step, num_responses, group_size: see FileHeader.
        scored: this rank's; if empty, it writes no file.
        keep_last: steps kept, including this one. Later steps, from before a resume, are deleted.

    Raises:
        UserError: on the rank that cannot write; see disk_errors.writing.
    """
    is_main = dist.get_rank() == 0
    final = root / f"step_{step:06d}"
    partial = final.with_suffix(".partial")
    if is_main:
        shutil.rmtree(partial, ignore_errors=True)
        with writing(partial):
            partial.mkdir(parents=True)
    dist.barrier()
    if scored:
        file = partial / f"rank_{dist.get_rank():05d}.safetensors"
        with writing(file):
            file.write_bytes(
                step_bytes(scored, step, num_responses=num_responses, group_size=group_size)
            )
    dist.barrier()
    if is_main:
        with writing(final):
            replace_directory(partial, final)
        kept = {f"step_{s:06d}" for s in range(step - keep_last + 1, step + 1)}
        for old in root.glob("step_*"):
            if old.name not in kept:
                with writing(old):
                    shutil.rmtree(old)


def held_steps(root: Path) -> list[int]:
    """Return the complete steps of a replay directory, in order."""
    matches = (_STEP.fullmatch(path.name) for path in root.glob("step_*"))
    return sorted(int(match[1]) for match in matches if match)


def read_headers(root: Path, step: int) -> list[tuple[Path, FileHeader]]:
    """Return the files of a step ordered by position, and check that they are one complete step.

    Raises:
        DataError: a file is damaged or from another step, or files are missing.
    """
    directory = root / f"step_{step:06d}"
    files = [(path, read_header(path)) for path in sorted(directory.glob("*.safetensors"))]
    files.sort(key=lambda item: item[1].first_position)
    expected = files[0][1].num_responses if files else 0
    found = sum(header.responses for _, header in files)
    if not files or found != expected:
        raise DataError(
            f"{directory} has {found} of {expected or 'unknown'} responses in {len(files)} files; "
            "copy it again from the run that dumped it"
        )
    for path, header in files:
        if (header.step, header.num_responses) != (step, expected):
            raise DataError(
                f"{path} is from step {header.step} with {header.num_responses} responses, the "
                f"others from step {step} with {expected}; copy it again from the run that dumped "
                "it"
            )
    return files


def read_file(path: Path) -> list[ScoredRollout]:
    """Return a file's rollouts in the order they were written.

    Raises:
        DataError: the file is damaged.
    """
    return read_arrays(path)[0]


def read_arrays(path: Path) -> tuple[list[ScoredRollout], dict[str, np.ndarray]]:
    """Return a file's rollouts as `read_file` does, and all its arrays by name."""
    with _opened(path) as (header, file):
        arrays = {name: file.get_tensor(name) for name in file.keys()}
        if _checksum(arrays) != header.crc32:
            raise ValueError("its checksum differs")
    return unpack(arrays), arrays


def read_array(path: Path, name: str) -> np.ndarray | None:
    """Return one array alone, None if there is none of this name; its checksum is not compared.

    Raises:
        DataError: the file is damaged.
    """
    with _opened(path) as (_, file):
        return file.get_tensor(name) if name in file.keys() else None


def read_header(path: Path) -> FileHeader:
    """Return a file's header. Raises DataError: the file is damaged."""
    with _opened(path) as (header, _):
        return header


def step_bytes(
    scored: Sequence[ScoredRollout],
    step: int,
    *,
    num_responses: int,
    group_size: int,
    more: Mapping[str, np.ndarray] | None = None,
) -> bytes:
    """Return the file of a rank's responses, of which there are some; for arguments: write_step.

    more: other arrays to be written, by their names.
    """
    arrays = pack(scored) | dict(more or {})
    rollouts = [item.rollout for item in scored]
    header = FileHeader(
        first_position=rollouts[0].position,
        responses=len(rollouts),
        longest_sequence=max(
            max(len(r.prompt.token_ids), len(r.prompt.critic_token_ids or ()))
            + len(r.token_ids)
            + r.num_inserted
            for r in rollouts
        ),
        largest_token_id=max(
            int(arrays[name].max(initial=0))
            for name in ("prompt_tokens", "critic_prompt_tokens", "tokens", "inserted_tokens")
            if name in arrays
        ),
        crc32=_checksum(arrays),
        step=step,
        num_responses=num_responses,
        group_size=group_size,
    )
    metadata = {name: str(value) for name, value in dataclasses.asdict(header).items()}
    return save(arrays, metadata={"format": _FORMAT, **metadata})


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[FileHeader, Any]]:
    """Yield a file's header and its reader; an error of the body means that it is damaged."""
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            found = metadata.get("format")
            if found != _FORMAT:
                raise ValueError(f"its format is {found!r}, not {_FORMAT!r}")
            try:
                fields = [int(metadata[f.name]) for f in dataclasses.fields(FileHeader)]
            except (KeyError, ValueError) as error:
                raise ValueError(f"its header: {error}") from None
            yield FileHeader(*fields), file
    except (OSError, SafetensorError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read ({' '.join(str(error).split())}); copy it again from the run "
            "that dumped it"
        ) from None


def _checksum(arrays: Mapping[str, np.ndarray]) -> int:
    checksum = 0
    for name in sorted(arrays):
        checksum = zlib.crc32(arrays[name].view(np.uint8).data, checksum)
    return checksum

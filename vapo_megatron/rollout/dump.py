"""Scored rollouts in binary files, from which a run can be replayed without a sampler.

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
import itertools
import json
import re
import shutil
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vapo_megatron.data.columns import SAMPLED
from vapo_megatron.data.rollout import STATUSES, Prompt, Rollout, ScoredRollout
from vapo_megatron.data.storage import replace_directory, writing
from vapo_megatron.errors import DataError

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
        UserError: on the rank that cannot write; see storage.writing.
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
    whole = files[0][1].num_responses if files else 0
    found = sum(header.responses for _, header in files)
    if not files or found != whole:
        raise DataError(
            f"{directory} has {found} of {whole or 'unknown'} responses in {len(files)} files; "
            "copy it again from the run that dumped it"
        )
    for path, header in files:
        if (header.step, header.num_responses) != (step, whole):
            raise DataError(
                f"{path} is from step {header.step} with {header.num_responses} responses, the "
                f"others from step {step} with {whole}; copy it again from the run that dumped it"
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
    return _unpack(arrays), arrays


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
    arrays = _pack(scored) | dict(more or {})
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


def _pack(scored: Sequence[ScoredRollout]) -> dict[str, np.ndarray]:
    """Return arrays with one entry per prompt or response, and concatenated ones with lengths."""
    rollouts = [item.rollout for item in scored]
    number: dict[Prompt, int] = {}
    prompt = [number.setdefault(r.prompt, len(number)) for r in rollouts]
    return {
        "prompt_index": np.array([p.index for p in number], np.int64),
        **_joined("prompt_tokens", (np.array(p.token_ids, np.int32) for p in number)),
        **_joined("prompt_text", (_to_bytes(p.text) for p in number)),
        **_joined("answer", (_to_bytes(p.answer) for p in number)),
        **_critic_prompts([p.critic_token_ids for p in number]),
        **_names("verifier", [p.problem.verifier for p in number]),
        **_names("source", [p.source for p in number]),
        "prompt": np.array(prompt, np.int32),
        "sample": np.array([r.sample for r in rollouts], np.int32),
        "position": np.array([r.position for r in rollouts], np.int32),
        "policy_version": np.array([r.policy_version for r in rollouts], np.int32),
        "truncated": np.array([r.truncated for r in rollouts], np.bool_),
        "status": np.array([STATUSES.index(item.status) for item in scored], np.uint8),
        "reward": np.array([item.reward for item in scored], np.float64),
        **_joined("tokens", (np.array(r.token_ids, np.int32) for r in rollouts)),
        **_joined("logprobs", (np.array(r.logprobs, np.float32) for r in rollouts)),
        **_joined("text", (_to_bytes(item.text) for item in scored)),
        **_segments(rollouts),
        **_inserted(rollouts),
        **_token_rewards(scored),
        **_columns(rollouts),
        **_names("metrics", [item.metrics and json.dumps(item.metrics) for item in scored]),
    }


def _segments(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Nothing where one version sampled each response; else version, tokens, version, ..."""
    if not any(r.segments for r in rollouts):
        return {}
    return _joined("segments", (np.array(r.segments, np.int32).ravel() for r in rollouts))


def _inserted(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Nothing where others inserted nothing; else before which token, how many, and the tokens."""
    if not any(r.inserted for r in rollouts):
        return {}
    parts = [[(before, len(ids)) for before, ids in r.inserted] for r in rollouts]
    return {
        **_joined("inserted_at", (np.array(part, np.int32).ravel() for part in parts)),
        "inserted_tokens": np.concatenate(
            [np.array(ids, np.int32) for r in rollouts for _, ids in r.inserted]
        ),
    }


def _token_rewards(scored: Sequence[ScoredRollout]) -> dict[str, np.ndarray]:
    """Nothing where none was earned on the way; else token, reward, token, ..."""
    if not any(item.token_rewards for item in scored):
        return {}
    parts = (np.array(item.token_rewards, np.float64).ravel() for item in scored)
    return _joined("token_rewards", parts)


def _columns(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Return the other numbers per token, which all or none of a rank's responses have."""
    names = rollouts[0].columns
    return {
        f"column_{n}": np.concatenate([np.array(r.columns[n]) for r in rollouts]) for n in names
    }


def _critic_prompts(prompts: Sequence[tuple[int, ...] | None]) -> dict[str, np.ndarray]:
    """Nothing where no prompt has one for the critic; no tokens stand for none."""
    if all(ids is None for ids in prompts):
        return {}
    return _joined("critic_prompt_tokens", (np.array(ids or (), np.int32) for ids in prompts))


def _names(name: str, names: Sequence[Any]) -> dict[str, np.ndarray]:
    """Nothing where none has a text, as in most runs; an empty text stands for none."""
    if not any(names):
        return {}
    return _joined(name, (_to_bytes(each or "") for each in names))


def _joined(name: str, parts: Iterator[np.ndarray]) -> dict[str, np.ndarray]:
    arrays = list(parts)
    lengths = np.array([len(a) for a in arrays], np.int64)
    return {name: np.concatenate(arrays), f"{name}_lengths": lengths}


def _to_bytes(text: str) -> np.ndarray:
    """Encode as UTF-8; a lone surrogate, which JSON allows, survives the round trip."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def _unpack(arrays: Mapping[str, np.ndarray]) -> list[ScoredRollout]:
    def parts(name: str) -> list[np.ndarray]:
        return np.split(arrays[name], arrays[f"{name}_lengths"].cumsum()[:-1])

    def packed(name: str, typecode: str) -> list[array[Any]]:
        return [array(typecode, part.tobytes()) for part in parts(name)]

    def texts(name: str) -> list[str]:
        return [part.tobytes().decode("utf-8", "surrogatepass") for part in parts(name)]

    def names(name: str, beside: str = "prompt_index") -> list[str | None]:
        if name not in arrays:
            return [None] * len(arrays[beside])
        return [found or None for found in texts(name)]

    of_critic: list[tuple[int, ...] | None] = [None] * len(arrays["prompt_index"])
    if "critic_prompt_tokens" in arrays:
        of_critic = [tuple(part.tolist()) or None for part in parts("critic_prompt_tokens")]
    segments: list[tuple[tuple[int, int], ...]] = [()] * len(arrays["position"])
    if "segments" in arrays:
        segments = [tuple(map(tuple, part.reshape(-1, 2).tolist())) for part in parts("segments")]
    prompts = list(
        map(
            Prompt,
            arrays["prompt_index"].tolist(),
            texts("prompt_text"),
            [tuple(part.tolist()) for part in parts("prompt_tokens")],
            texts("answer"),
            [{} if name is None else {"verifier": name} for name in names("verifier")],
            names("source"),
            of_critic,
        )
    )
    bounds = arrays["tokens_lengths"].cumsum()[:-1]
    columns = [dict[str, Any]() for _ in arrays["position"]]
    for name in SAMPLED:
        if f"column_{name}" in arrays:
            for own, part in zip(columns, np.split(arrays[f"column_{name}"], bounds)):
                own[name] = array(part.dtype.char, part.tobytes())
    rollouts = map(
        Rollout,
        [prompts[number] for number in arrays["prompt"].tolist()],
        arrays["sample"].tolist(),
        arrays["position"].tolist(),
        packed("tokens", "i"),
        packed("logprobs", "f"),
        arrays["truncated"].tolist(),
        arrays["policy_version"].tolist(),
        segments,
        _read_inserted(arrays, parts),
        columns,
    )
    statuses = [STATUSES[number] for number in arrays["status"].tolist()]
    rewards = arrays["reward"].tolist()
    metrics = [{} if found is None else json.loads(found) for found in names("metrics", "position")]
    earned: list[tuple[tuple[int, float], ...]] = [()] * len(rewards)
    if "token_rewards" in arrays:
        pairs = (part.reshape(-1, 2).tolist() for part in parts("token_rewards"))
        earned = [tuple((int(token), reward) for token, reward in part) for part in pairs]
    scored = map(ScoredRollout, rollouts, texts("text"), statuses, rewards)
    return [
        dataclasses.replace(item, metrics=found, token_rewards=on_the_way)
        for item, found, on_the_way in zip(scored, metrics, earned, strict=True)
    ]


def _read_inserted(
    arrays: Mapping[str, np.ndarray], parts: Callable[[str], list[np.ndarray]]
) -> list[tuple[tuple[int, array[int]], ...]]:
    """Undo _inserted."""
    if "inserted_at" not in arrays:
        return [()] * len(arrays["position"])
    tokens, found = iter(arrays["inserted_tokens"].tolist()), []
    for part in parts("inserted_at"):
        pairs = part.reshape(-1, 2).tolist()
        found.append(tuple((at, array("i", itertools.islice(tokens, n))) for at, n in pairs))
    return found

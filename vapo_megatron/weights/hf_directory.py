"""Writes the files of an HF directory; a new directory is built beside the old one.

An export, and a conversion in either direction, runs in one process or in several that share a file
system: each writes its own files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vapo_megatron.data.disk_errors import NO_ROOM, describe_write_error
from vapo_megatron.data.storage import replace_directory
from vapo_megatron.errors import CheckpointError
from vapo_megatron.parallel.reduce import gather_objects
from vapo_megatron.weights.copying import write_exactly
from vapo_megatron.weights.hf_reader import DTYPES, INDEX_FILE, SINGLE_FILE

T = TypeVar("T")
MAX_FILE_BYTES = 4 << 30
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = {"format": "pt", "producer": "vapo_megatron"}
CONVERSION_FILE = "conversion.json"
"""In a converted Megatron checkpoint: what it was converted from."""
EXPORT_FILE = "export.json"
"""In an export of a run: the step that it was made after, and the stop tokens."""
_AUXILIARY = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "chat_template*", "*.model", "LICENSE*",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Unfinished:
    """A hidden directory that is being filled."""

    path: Path
    final: Path
    num_bytes: int
    """That the finished directory will take."""

    def together(self, action: Callable[[], T], *, alone: bool = False) -> T | None:
        """Run an action on all processes; if it fails on one, raise on all, so that none waits.

        Args:
            action: to run.
            alone: only rank 0 runs it, the others wait.

        Raises:
            CheckpointError: the first problem.
        """
        result = problem = None
        try:
            if not alone or _is_main():
                result = action()
        except OSError as error:
            problem = self._describe(error)
        except ValueError as error:
            problem = str(error) or repr(error)
        for found in gather_objects(problem):
            if found:
                raise CheckpointError(found)
        return result

    def _describe(self, error: OSError) -> str:
        if error.errno not in NO_ROOM:
            return f"{self.final} cannot be written: {error}; fix that"
        why = describe_write_error(self.final, error, self.num_bytes, unfinished=[self.path])
        return f"{why} and start again"


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


@contextlib.contextmanager
def atomic_directory(
    out_dir: Path, source: Path, num_bytes: int, *, overwrite: bool = True
) -> Iterator[Unfinished]:
    """Yield a hidden directory to fill; rename it to out_dir when all processes are done.

    It is removed on an error; what a killed process leaves is removed by the next one.

    Args:
        out_dir: path of the finished directory.
        source: directory whose config.json and tokenizer are copied.
        num_bytes: that out_dir will take.
        overwrite: replace an earlier export or conversion; nothing else ever is.

    Raises:
        CheckpointError: on every rank, when out_dir is taken or source cannot be copied.
    """
    partial = out_dir.parent / f".{out_dir.name}.partial"
    unfinished = Unfinished(partial, out_dir, num_bytes)
    unfinished.together(lambda: _prepare(partial, out_dir, source, overwrite), alone=True)
    try:
        yield unfinished
        unfinished.together(lambda: replace_directory(partial, out_dir), alone=True)
    except BaseException:
        if _is_main():
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _prepare(partial: Path, out_dir: Path, source: Path, overwrite: bool) -> None:
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source} has no config.json to copy; give an HF directory")
    if source.resolve().is_relative_to(out_dir.resolve()):
        raise CheckpointError(
            f"{out_dir} holds {source}, the directory to copy from; export somewhere else"
        )
    if out_dir.exists() or out_dir.is_symlink():
        if not _is_replaceable(out_dir):
            raise CheckpointError(
                f"{out_dir} exists and is not an earlier export; remove it or export somewhere else"
            )
        if not overwrite and any(out_dir.iterdir()):
            raise CheckpointError(f"{out_dir} exists; give another directory, or --overwrite")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _is_replaceable(directory: Path) -> bool:
    if not directory.is_dir() or directory.is_symlink():
        return False
    if (directory / CONVERSION_FILE).is_file():
        return True
    weights = next(directory.glob("*.safetensors"), None)
    if weights is None:
        return not any(directory.iterdir())
    try:
        with safe_open(weights, framework="pt") as file:
            return (file.metadata() or {}).get("producer") == _METADATA["producer"]
    except SafetensorError:
        return False


def note_export(directory: Path, step: int | None, stop_token_ids: Sequence[int]) -> None:
    """Write down that an export is the run's model after `step` steps; None: nothing is known."""
    if step is not None:
        noted = {"step": step, "stop_token_ids": sorted(set(stop_token_ids))}
        (directory / EXPORT_FILE).write_text(json.dumps(noted) + "\n")


def exported_step(directory: Path) -> int | None:
    """Return how many steps a run had finished when it was exported; None: unknown."""
    step = _noted(directory).get("step")
    return step if isinstance(step, int) else None


def exported_stop_tokens(directory: Path) -> set[int]:
    """Return what ended the responses of the run that a directory is an export of; else empty."""
    return set(_noted(directory).get("stop_token_ids") or ())


def _noted(directory: Path) -> dict[str, Any]:
    try:
        noted = json.loads((directory / EXPORT_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def divide(items: Sequence[T], num_bytes: Callable[[T], int], max_file_bytes: int) -> list[list[T]]:
    """Divide items, in order, over files of at most max_file_bytes; a larger item has its own."""
    files: list[list[T]] = []
    used = 0
    for item in items:
        size = num_bytes(item)
        if not files or used + size > max_file_bytes:
            files.append([])
            used = 0
        files[-1].append(item)
        used += size
    return files


def file_names(count: int) -> list[str]:
    """Return the names that transformers gives to the safetensors files of a model."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_safetensors(path: Path, tensors: list[TensorPlan], data: Iterator[Tensor]) -> None:
    """Write a safetensors file: 8 bytes with the header's size, a JSON header, then the tensors.

    Args:
        tensors: what it holds.
        data: the tensors in order, each whole or in blocks of rows.
    """
    with open(path, "wb") as out:
        place = out.write(safetensors_header(tensors))
        out.flush()
        for t in tensors:
            left = t.num_bytes
            while left:
                tensor = next(data).cpu().contiguous()
                left -= tensor.nbytes
                assert tensor.dtype == t.dtype and left >= 0, (
                    f"{t.name}: planned {t.shape} {t.dtype}, got {tuple(tensor.shape)} too much"
                )
                write_exactly(out, place, tensor)
                place += tensor.nbytes
        os.fsync(out.fileno())


def safetensors_header(tensors: list[TensorPlan]) -> bytes:
    """Return the header of a safetensors file with these tensors in this order."""
    header: dict[str, Any] = {"__metadata__": _METADATA}
    offset = 0
    for t in tensors:
        end = offset + t.num_bytes
        header[t.name] = {
            "dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def copy_settings(
    source: Path,
    partial: Path,
    family: str,
    role: str,
    dtype: torch.dtype | None,
    stop_token_ids: Sequence[int] = (),
) -> None:
    """Copy tokenizer and generation settings, following links, but nothing executable.

    config.json gets the architecture and the type of the export, generation_config.json what ends a
    response; what does not change is copied byte for byte.

    Args:
        source: directory with a config.json.
        partial: where to write.
        family, role: see architecture.
        dtype: of the parameters; None: as the file says.
        stop_token_ids: where the policy's responses ended in training; empty: unknown.
    """
    for pattern in _AUXILIARY:
        for file in source.glob(pattern):
            if file.is_file() and file.suffix not in (".py", ".safetensors"):
                shutil.copyfile(file, partial / file.name)
    before = read_config(source)
    config = {**before, "architectures": [architecture(before, family, role)]}
    config.pop("auto_map", None)  # Names Python files, which are not copied.
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        config.update(
            dict.fromkeys({"torch_dtype", "dtype"} & set(config) or {"torch_dtype"}, name)
        )
    if role == "critic" and config["architectures"] != before.get("architectures"):
        labels = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
        config.update(num_labels=1, classifier_dropout=0.0, **labels)
    if config == before:
        shutil.copyfile(source / "config.json", partial / "config.json")
    else:
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if role == "actor" and stop_token_ids:
        _note_stop_tokens(partial / "generation_config.json", before, stop_token_ids)


def _note_stop_tokens(file: Path, config: dict[str, Any], stop_token_ids: Sequence[int]) -> None:
    """Let transformers' generate and vLLM end a response where the policy did.

    A new file gets what transformers would have taken from config.json in its place.
    """
    settings: dict[str, Any] = {
        name: config[name] for name in ("bos_token_id", "pad_token_id") if name in config
    }
    if file.is_file():
        settings = json.loads(file.read_text())
    found = settings.get("eos_token_id")
    if set(found if isinstance(found, list) else [found]) != set(stop_token_ids):
        settings["eos_token_id"] = sorted(set(stop_token_ids))
        file.write_text(json.dumps(settings, indent=2) + "\n")


def architecture(config: dict[str, Any], family: str, role: str) -> str:
    """Return the transformers class of an export: the source's own, if that fits the role.

    Args:
        config: what config.json holds.
        family: model_type, "qwen2".
        role: "actor" (ForCausalLM) or "critic" (from a policy: ForTokenClassification, whose logits
            [B, S, 1] are V at each position; sequence classification has the last one alone).
    """
    heads: tuple[str, ...] = ("ForCausalLM",)
    if role == "critic":
        heads = ("ForTokenClassification", "ForSequenceClassification")
    match config.get("architectures"):
        case [str(name)] if name.endswith(heads):
            return name
    return family.capitalize() + heads[0]


def read_config(source: Path) -> dict[str, Any]:
    """Return what a directory's config.json holds."""
    return json.loads((source / "config.json").read_text())


def write_index(partial: Path, files: dict[str, list[TensorPlan]]) -> None:
    """Write the index of several files, after checking that all exist.

    Args:
        partial: the directory.
        files: file name -> its tensors.
    """
    missing = sorted(f for f in files if not (partial / f).is_file())
    if missing:
        raise CheckpointError(
            f"{partial} lacks {', '.join(missing)}: each pipeline stage's first rank writes "
            "its files there; export to a file system that they share"
        )
    if SINGLE_FILE not in files:
        weight_map = {t.name: file for file, tensors in files.items() for t in tensors}
        total_bytes = sum(t.num_bytes for tensors in files.values() for t in tensors)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

"""megatron-core distributed checkpoint -> Hugging Face directory, a block of rows at a time.

Reads what to_megatron.py writes and a run's checkpoints (checkpoints/step_*/actor and critic,
without their optimizers), of any layout. No model is built.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from vapo_megatron.config.lora import LoraConfig
from vapo_megatron.errors import CheckpointError
from vapo_megatron.models.hf_config import ModelShape, read_model_shape
from vapo_megatron.weights.adapter_table import ADAPTER
from vapo_megatron.weights.convert.sharded_files import ShardedReader
from vapo_megatron.weights.convert.sharded_tensors import (
    ShardedTensor,
    is_of_model,
    sharded_tensors,
)
from vapo_megatron.weights.convert.team import OnProgress, Team
from vapo_megatron.weights.copying import Blocks, row_blocks, write_exactly
from vapo_megatron.weights.expected import compare_tensors
from vapo_megatron.weights.hf_directory import (
    CONVERSION_FILE,
    MAX_FILE_BYTES,
    TensorPlan,
    architecture,
    atomic_directory,
    copy_settings,
    divide,
    file_names,
    note_export,
    read_config,
    safetensors_header,
    write_index,
)
from vapo_megatron.weights.hf_reader import DTYPES
from vapo_megatron.weights.peft_files import (
    PREFIX,
    WEIGHTS_FILE,
    base_digest,
    wanted_tensors,
    write_peft_config,
)
from vapo_megatron.weights.table import EMBEDDING, OUTPUT, VALUE_HEAD_BIAS

_EMBEDDING_KEY, _HEAD_KEY = "embedding.word_embeddings.weight", "output_layer.weight"
_BIAS_KEY = "output_layer.bias"


@dataclasses.dataclass(frozen=True)
class _Item:
    """An HF tensor as part of a Megatron tensor; None: zeros."""

    plan: TensorPlan
    tensor: ShardedTensor | None
    part: int = 0


def convert_to_hf(
    megatron: str | Path,
    out: str | Path,
    hf: str | Path | None = None,
    *,
    overwrite: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
    on_progress: OnProgress | None = None,
) -> Path:
    """Convert a checkpoint; called by every process that torchrun started, or by one.

    For a critic's class see hf_directory.architecture.

    Args:
        megatron: directory of a distributed checkpoint.
        out: where the Hugging Face directory goes.
        hf: directory whose config.json, generation settings and tokenizer are copied; None: the
            checkpoint's own.
        overwrite: replace an earlier export.
        max_file_bytes: largest file, unless a single tensor is larger.
        on_progress: see OnProgress.

    Returns:
        out.

    Raises:
        UserError: before anything is written, naming what was expected and what was found.
    """
    team, out, megatron = Team(on_progress), Path(out).absolute(), Path(megatron)
    source = megatron if hf is None else Path(hf)
    reader = ShardedReader(megatron)
    if hf is None and not (source / "config.json").is_file():
        raise CheckpointError(
            f"{source} has no config.json; give the model's Hugging Face directory with --hf"
        )
    shape = _read_shape(source, megatron)
    role = checkpoint_role(reader)
    if has_adapters(reader):
        return _convert_adapters(reader, shape, role, out, source, overwrite=overwrite, team=team)
    items = [
        _Item(TensorPlan(name, size, reader.dtype(tensor.key)), tensor, part)
        for tensor in check_checkpoint(reader, shape, role)
        for part, (name, size) in enumerate(zip(tensor.hf_names, tensor.hf_shapes, strict=True))
    ]
    info = _conversion(megatron)
    if role == "critic" and _BIAS_KEY not in reader.tensors:
        # transformers' TokenClassification has a bias; zero where the checkpoint has none.
        class_name = architecture(read_config(source), shape.family, role)
        if class_name.endswith("TokenClassification"):
            items.append(_Item(TensorPlan(VALUE_HEAD_BIAS, (1,), reader.dtype(_HEAD_KEY)), None))
    if info.get("tied_output"):  # The original file had an output matrix, too.
        (one,) = [i for i in items if i.plan.name == EMBEDDING]
        items.append(dataclasses.replace(one, plan=dataclasses.replace(one.plan, name=OUTPUT)))
    # Wider types first: the safetensors reader needs each tensor aligned to its type.
    items.sort(key=lambda item: -item.plan.dtype.itemsize)
    contents = divide(items, lambda item: item.plan.num_bytes, max_file_bytes)
    files = dict(zip(file_names(len(contents)), contents, strict=True))
    num_bytes = sum(item.plan.num_bytes for item in items)
    with atomic_directory(out, source, num_bytes, overwrite=overwrite) as unfinished:
        partial = unfinished.path
        unfinished.together(lambda: _write(files, partial, reader, team))

        def finish() -> None:
            dtype = None if info and hf is None else reader.dtype(_EMBEDDING_KEY)
            copy_settings(source, partial, shape.family, role, dtype, _run_of(megatron)[1])
            write_index(partial, {name: [i.plan for i in file] for name, file in files.items()})
            note_export(partial, *_run_of(megatron))

        unfinished.together(finish, alone=True)
    return out


def _read_shape(source: Path, megatron: Path) -> ModelShape:
    """Read the sizes; refuse another vocabulary than the checkpoint's: padding would hide it."""
    shape = read_model_shape(source, "--hf")
    if not (megatron / "config.json").is_file():
        return shape
    own = read_model_shape(megatron, "--megatron").vocab_size
    if shape.vocab_size != own:
        raise CheckpointError(
            f"--hf={source} has vocab_size={shape.vocab_size}, but {megatron} was converted with "
            f"{own}; give the directory that it was made of, or leave --hf out"
        )
    return shape


def _convert_adapters(
    reader: ShardedReader,
    shape: ModelShape,
    role: str,
    out: Path,
    source: Path,
    *,
    overwrite: bool,
    team: Team,
) -> Path:
    """Convert a run's checkpoint of adapters to a PEFT directory."""
    if role == "critic":
        raise CheckpointError(
            f"{reader.directory} holds a critic's adapters, which have no form in peft; give the "
            "checkpoint of an actor, or start a critic from it with model.critic_checkpoint"
        )
    lora, trained_on = _lora_of(reader.directory)
    if trained_on is not None and base_digest(source) not in (trained_on, None):
        raise CheckpointError(
            f"--hf={source} has other weights than those that the adapters in {reader.directory} "
            "were trained on; give the base model that the run began with"
        )
    used = wanted_tensors(shape, lora)
    tensors = check_tensors(reader, shape, role, lora)
    reader.check_files({tensor.key for tensor in tensors})
    items = [
        _Item(TensorPlan(PREFIX + name, size, reader.dtype(tensor.key)), tensor, part)
        for tensor in tensors
        for part, (name, size) in enumerate(zip(tensor.hf_names, tensor.hf_shapes, strict=True))
        if name in used
    ]
    num_bytes = sum(item.plan.num_bytes for item in items)
    with atomic_directory(out, source, num_bytes, overwrite=overwrite) as unfinished:
        partial = unfinished.path
        unfinished.together(lambda: _write({WEIGHTS_FILE: items}, partial, reader, team))

        def finish() -> None:
            write_peft_config(partial, shape, lora, source)
            note_export(partial, *_run_of(reader.directory))

        unfinished.together(finish, alone=True)
    return out


def _lora_of(directory: Path) -> tuple[LoraConfig, str | None]:
    """Return model.lora, and the digest of the base, of the run whose checkpoint a role is in."""
    try:
        state = json.loads((directory.absolute().parent / "state.json").read_bytes())
        run = state["run"]
        return LoraConfig.model_validate(run["config"]["model"]["lora"]), run.get("base")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"{directory} holds adapters, but its run's settings cannot be read from "
            f"{directory.parent / 'state.json'} ({type(error).__name__}); give a directory within "
            "a run's checkpoint"
        ) from None


def checkpoint_role(reader: ShardedReader) -> str:
    """Return "critic" if the checkpoint's output has one row, else "actor"."""
    has_head = _HEAD_KEY in reader.tensors
    return "critic" if has_head and reader.shape(_HEAD_KEY)[0] == 1 else "actor"


def check_checkpoint(reader: ShardedReader, shape: ModelShape, role: str) -> list[ShardedTensor]:
    """Like check_tensors; also check that the files hold all of the tensors."""
    expected = check_tensors(reader, shape, role)
    reader.check_files({tensor.key for tensor in expected})
    return expected


def has_adapters(reader: ShardedReader) -> bool:
    """Is it a checkpoint of adapters, without the weights below them?"""
    return any(f"{ADAPTER}." in key for key in reader.tensors)


def _rank_of(reader: ShardedReader) -> int:
    """Return the rank of a checkpoint's adapters."""
    return next(reader.shape(key)[-1] for key in reader.tensors if key.endswith(f"{ADAPTER}.B"))


def check_tensors(
    reader: ShardedReader, shape: ModelShape, role: str, lora: LoraConfig | None = None
) -> list[ShardedTensor]:
    """Compare names, shapes and types of a checkpoint's tensors with the model's.

    Args:
        reader: of the checkpoint. Optimizer state in it is ignored.
        role: "actor" or "critic". A critic may start from an actor's checkpoint; its output layer
            is then not in the result.
        lora: expect adapters and a value head; None: a whole model.

    Returns:
        The model's tensors in the checkpoint.

    Raises:
        CheckpointError: names tensors with what was expected and found.
    """
    check_adapted(reader, role, lora)
    found = {key for key in reader.tensors if is_of_model(key)}
    if role == "critic" and checkpoint_role(reader) == "actor":
        found.discard(_HEAD_KEY)
    padded = shape.vocab_size
    if _EMBEDDING_KEY in found:
        padded = max(padded, reader.shape(_EMBEDDING_KEY)[0])
    expected = sharded_tensors(shape, role, padded, value_bias=_BIAS_KEY in found, lora=lora)
    if role == "critic" and _HEAD_KEY not in found:
        expected = [tensor for tensor in expected if tensor.key != _HEAD_KEY]
    sizes = {tensor.key: tensor.global_shape for tensor in expected}
    compare_tensors(reader, role, sizes, sorted(found), DTYPES.values())
    return expected


def check_adapted(reader: ShardedReader, role: str, lora: LoraConfig | None) -> None:
    """Refuse adapters in place of whole weights, the reverse, and those of another rank.

    Args:
        reader, role, lora: see check_tensors.

    Raises:
        CheckpointError: names model.lora.rank.
    """
    if has_adapters(reader) != (lora is not None):
        held, asked = ("adapters", "null") if lora is None else ("whole weights", f"{lora.rank}")
        raise CheckpointError(
            f"{reader.directory} holds {held} of the {role}, which model.lora.rank={asked} does "
            "not train; use the settings of the run that wrote it"
        )
    if lora is not None and (rank := _rank_of(reader)) != lora.rank:
        raise CheckpointError(
            f"{reader.directory} holds adapters of rank {rank}, which model.lora.rank={lora.rank} "
            f"must equal; set it to {rank}"
        )


def _conversion(directory: Path) -> dict:
    """Return to_megatron.py's CONVERSION_FILE; {} for a run's checkpoint."""
    file = directory / CONVERSION_FILE
    if not file.is_file():
        return {}
    try:
        noted = json.loads(file.read_bytes())
    except ValueError:
        noted = None
    if not isinstance(noted, dict):
        raise CheckpointError(f"{file} is damaged, not a JSON object; convert the checkpoint again")
    return noted


def _run_of(directory: Path) -> tuple[int | None, Sequence[int]]:
    """Return the step and the stop tokens of the run's checkpoint that a role's directory is in.

    None and empty: it is in none, or an older release wrote it without.
    """
    try:
        state = json.loads((directory.absolute().parent / "state.json").read_bytes())
        return state.get("step"), state.get("run", {}).get("stop_token_ids", ())
    except (OSError, ValueError, AttributeError):
        return None, ()


def _write(
    files: dict[str, list[_Item]], directory: Path, reader: ShardedReader, team: Team
) -> None:
    """Write this process's files."""
    names = list(files)
    sizes = [sum(item.plan.num_bytes for item in files[name]) for name in names]
    mine = team.divide(sizes)
    team.total = sum(sizes[i] for i in mine)
    blocks = Blocks()
    for name in (names[i] for i in mine):
        with open(directory / name, "wb") as file:
            place = file.write(safetensors_header([item.plan for item in files[name]]))
            file.truncate(place + sum(item.plan.num_bytes for item in files[name]))
            file.flush()
            for item in files[name]:
                row_bytes = item.plan.num_bytes // item.plan.shape[0]
                for start, count in row_blocks(item.plan.shape[0], row_bytes):
                    _write_rows(item, start, count, reader, blocks, file, place)
                    place += count * row_bytes
                    team.add(count * row_bytes)


def _write_rows(
    item: _Item,
    start: int,
    count: int,
    reader: ShardedReader,
    blocks: Blocks,
    file: BinaryIO,
    place: int,
) -> None:
    """Write rows of an HF tensor into a file at offset `place`; a new bias stays zero."""
    tensor, plan = item.tensor, item.plan
    if tensor is None:
        return
    for run in tensor.runs:
        first, last = max(start, run.first), min(start + count, run.first + run.num_rows)
        if run.tensor == item.part and first < last:
            key, index, row = tensor.key, tensor.index, run.start + first - run.first
            to = place + (first - start) * (plan.num_bytes // plan.shape[0])
            if reader.has_whole_rows(key, index):
                reader.copy_rows(key, index, row, last - first, file, to)
                continue
            rows = blocks.get((last - first, *plan.shape[1:]), plan.dtype)
            reader.read_rows(key, index, row, rows)
            write_exactly(file, to, rows)

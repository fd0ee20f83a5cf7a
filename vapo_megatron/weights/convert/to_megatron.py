"""Hugging Face directory -> megatron-core distributed checkpoint, a block of rows at a time.

Each HF tensor is read once, front to back, and sharded over the tensor-parallel ranks' files; at
most a block is in memory, and no model is built. The checkpoint contains config.json and the
tokenizer, too, so that training accepts it in place of a Hugging Face directory.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from vapo_megatron.config import ParallelConfig
from vapo_megatron.errors import CheckpointError
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.models.layout_rules import check_layout
from vapo_megatron.parallel.reduce import gather_objects
from vapo_megatron.weights.convert.sharded_files import (
    Written,
    append_chunk,
    append_empty_objects,
    finish_checkpoint,
)
from vapo_megatron.weights.convert.sharded_tensors import (
    EXTRA_STATES,
    ShardedTensor,
    sharded_tensors,
)
from vapo_megatron.weights.convert.team import OnProgress, Team
from vapo_megatron.weights.copying import Blocks, row_blocks, write_exactly
from vapo_megatron.weights.hf_directory import CONVERSION_FILE, atomic_directory, copy_settings
from vapo_megatron.weights.hf_reader import DTYPES, HfReader
from vapo_megatron.weights.holders import TrainerLayout, layout_of
from vapo_megatron.weights.load_hf import check_hf_tensors, check_tied
from vapo_megatron.weights.table import EMBEDDING, OUTPUT, VALUE_HEAD, VALUE_HEAD_BIAS


def convert_to_megatron(
    hf: str | Path,
    out: str | Path,
    parallel: ParallelConfig,
    role: str = "actor",
    *,
    make_vocab_size_divisible_by: int = 128,
    value_head_init_std: float = 0.0,
    seed: int = 0,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> Path:
    """Convert a directory; called by every process that torchrun started, or by one.

    Args:
        hf: Hugging Face directory; for a critic, of a policy or a reward model.
        out: where the checkpoint goes.
        parallel: tensor, pipeline and virtual pipeline sizes, which decide how tensors are divided
            over files. Any layout can load it; with the same one a rank reads only its own files.
        role: "actor" or "critic".
        make_vocab_size_divisible_by: of the vocabulary's padding; see ModelConfig.
        value_head_init_std, seed: weights of a critic's new value head.
        overwrite: replace an earlier conversion.
        on_progress: see OnProgress.

    Returns:
        out.

    Raises:
        UserError: before anything is written, naming what was expected and what was found.
    """
    team, out, hf = Team(on_progress), Path(out).absolute(), Path(hf)
    shape = read_model_shape(hf, "--hf")
    check_layout(shape, parallel)
    reader = HfReader(hf)
    check_hf_tensors(reader, shape, role)
    present = set(reader.names())
    place = layout_of(shape, parallel, make_vocab_size_divisible_by)
    # Each shard is written once, by the first rank that holds it.
    ranks = math.lcm(place.tp_size, place.ep_size)
    place = dataclasses.replace(place, dp_size=ranks // place.tp_size)
    has_bias = role == "critic" and VALUE_HEAD_BIAS in present
    tensors = sharded_tensors(shape, role, place.vocab_rows, value_bias=has_bias)
    dtypes = _dtypes(reader, tensors)
    tied_output = shape.tied and role == "actor" and OUTPUT in present
    if tied_output:
        check_tied(reader, lambda name: _row_blocks(reader, name))
    head = torch.randn(1, shape.hidden_size, generator=torch.Generator().manual_seed(seed))
    head = (value_head_init_std * head).to(dtypes["embedding.word_embeddings.weight"])

    num_bytes = sum(t.num_rows * t.num_columns * dtypes[t.key].itemsize for t in tensors)
    with atomic_directory(out, hf, num_bytes, overwrite=overwrite) as unfinished:
        partial = unfinished.path
        worker = _Worker(partial, reader, place, team, None if VALUE_HEAD in present else head)
        written = unfinished.together(lambda: worker.write(tensors, dtypes))
        everything = list(itertools.chain(*gather_objects(written or [])))

        def finish() -> None:
            empty = [] if shape.experts else _extra_states(partial, tensors, place)
            finish_checkpoint(partial, [*empty, *everything])
            copy_settings(hf, partial, shape.family, role, None)
            content = {"producer": "vapo_megatron", "role": role, "tied_output": tied_output}
            (partial / CONVERSION_FILE).write_text(json.dumps(content, indent=1) + "\n")

        unfinished.together(finish, alone=True)
    return out


def read_rows(tensor: ShardedTensor, start: int, out: Tensor, reader: HfReader) -> None:
    """Fill `out` with rows of a Megatron tensor from `start` on, from its HF tensors."""
    for name, row, at, count in _sources(tensor, start, len(out)):
        reader.read_rows(name, row, out[at : at + count])
    unpadded = sum(size[0] for size in tensor.hf_shapes)
    out[max(0, unpadded - start) :].zero_()


def copy_rows(
    tensor: ShardedTensor, start: int, count: int, reader: HfReader, out: BinaryIO, place: int
) -> None:
    """Copy rows of a Megatron tensor into a file at offset `place`; padding stays a hole."""
    row_bytes = tensor.num_columns * DTYPES[reader.dtype(tensor.hf_names[0])].itemsize
    for name, row, at, num_rows in _sources(tensor, start, count):
        reader.copy_rows(name, row, num_rows, out, place + at * row_bytes)


def _sources(tensor: ShardedTensor, start: int, count: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield (HF tensor, first row in it, that row's index in the output, number of rows)."""
    for run in tensor.runs:
        first, last = max(start, run.start), min(start + count, run.start + run.num_rows)
        if first < last:
            name = tensor.hf_names[run.tensor]
            yield name, run.first + first - run.start, first - start, last - first


@dataclasses.dataclass
class _Worker:
    """One process's part of the work."""

    directory: Path
    reader: HfReader
    place: TrainerLayout
    team: Team
    new_head: Tensor | None
    rows: Blocks = dataclasses.field(default_factory=Blocks)
    columns: Blocks = dataclasses.field(default_factory=Blocks)

    def write(self, tensors: list[ShardedTensor], dtypes: dict[str, torch.dtype]) -> list[Written]:
        """Write this process's tensors into every rank's files."""
        sizes = [torch.Size(t.part(1, t.num_rows, t.num_columns)).numel() for t in tensors]
        mine = self.team.divide(sizes)
        self.team.total = sum(sizes[i] * dtypes[tensors[i].key].itemsize for i in mine)
        written = []
        for i in mine:
            written += self._write_tensor(tensors[i], dtypes[tensors[i].key])
        return written

    def _write_tensor(self, tensor: ShardedTensor, dtype: torch.dtype) -> list[Written]:
        written = []
        stage, _ = self.place.home(tensor.row, tensor.layer)
        of_rows = defaultdict(list)  # boxes that share rows: read them once
        for box in tensor.boxes(self.place):
            of_rows[box.first_row, box.num_rows].append(box)
        for (first_row, num_rows), boxes in of_rows.items():
            for start, count in row_blocks(num_rows, tensor.num_columns * dtype.itemsize):
                row, rows = first_row + start, None
                if boxes[0].num_columns < tensor.num_columns:
                    rows = self.rows.get((count, tensor.num_columns), dtype)
                    read_rows(tensor, row, rows, self.reader)
                for box in boxes:
                    with self._file(self.place.holders([stage], box.member)[0]) as file:
                        chunk, place = append_chunk(
                            file,
                            tensor.key,
                            tensor.global_shape,
                            tensor.part(tensor.index or 0, row, box.first_column),
                            tensor.part(1, count, box.num_columns),
                            dtype,
                        )
                        if rows is not None:
                            stop = box.first_column + box.num_columns
                            block = self.columns.get((count, box.num_columns), dtype)
                            write_exactly(
                                file, place, block.copy_(rows[:, box.first_column : stop])
                            )
                        elif tensor.hf_names == (VALUE_HEAD,) and self.new_head is not None:
                            write_exactly(file, place, self.new_head)
                        else:
                            copy_rows(tensor, row, count, self.reader, file, place)
                    written.append(chunk)
                    self.team.add(math.prod(chunk.sizes) * dtype.itemsize)
        return written

    def _file(self, rank: int) -> BinaryIO:
        """Open a rank's file, for reading, too, as append_chunk needs."""
        path = self.directory / f"__{rank}_{self.team.rank}.distcp"
        path.touch()
        return cast(BinaryIO, open(path, "r+b", buffering=0))


def _extra_states(
    directory: Path, tensors: list[ShardedTensor], place: TrainerLayout
) -> list[Written]:
    """Write the empty extra states of every layer into its stage's first file."""
    written = []
    stages = {t.layer: place.home(t.row, t.layer)[0] for t in tensors if t.layer is not None}
    for layer, stage in stages.items():
        rank = place.rank(stage, 0, 0)
        keys = [f"{key}/shard_{layer}_{len(stages)}" for key in EXTRA_STATES]
        written += append_empty_objects(directory, f"__{rank}_0.distcp", keys)
    return written


def _dtypes(reader: HfReader, tensors: list[ShardedTensor]) -> dict[str, torch.dtype]:
    """Return each checkpoint tensor's type; all of its HF tensors must have it."""
    first: dict[str, str] = {}
    present = set(reader.names())
    for tensor in tensors:
        for name in tensor.hf_names if tensor.hf_names[0] in present else (EMBEDDING,):
            of = first.setdefault(tensor.key, name)
            if reader.dtype(name) != reader.dtype(of):
                raise CheckpointError(
                    f"{reader.directory}: {name}: expected {reader.dtype(of)} as {of}, with which "
                    f"it forms one tensor, found {reader.dtype(name)}"
                )
    return {key: DTYPES[reader.dtype(name)] for key, name in first.items()}


def _row_blocks(reader: HfReader, name: str) -> Iterator[Tensor]:
    """Yield blocks of rows of an HF tensor, each valid until the next one."""
    (num_rows, columns), dtype = reader.shape(name), DTYPES[reader.dtype(name)]
    blocks = Blocks()
    for start, count in row_blocks(num_rows, columns * dtype.itemsize):
        block = blocks.get((count, columns), dtype)
        reader.read_rows(name, start, block)
        yield block

"""Compares the tensors of a file, or of a checkpoint, with those that a model has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from vapo_megatron.errors import CheckpointError
from vapo_megatron.weights.hf_reader import HfReader

if TYPE_CHECKING:
    from vapo_megatron.weights.convert.sharded_files import ShardedReader


def compare_tensors(
    reader: HfReader | ShardedReader,
    role: str,
    expected: Mapping[str, tuple[int, ...]],
    present: Collection[str],
    types: Collection[Any],
) -> None:
    """Refuse a file, or a checkpoint, that does not hold exactly the expected tensors.

    Args:
        reader: gives a tensor's shape and type.
        role: "actor" or "critic".
        expected: name -> shape.
        present: names of the tensors that count.
        types: allowed, as the reader says them.

    Raises:
        CheckpointError: names tensors with what was expected and found.
    """
    problems = []
    for name, size in expected.items():
        if name not in present:
            problems.append(f"{name} is missing (expected shape {list(size)})")
        elif reader.shape(name) != size:
            found = list(reader.shape(name))
            problems.append(f"{name}: expected shape {list(size)}, found {found}")
        elif reader.dtype(name) not in types:
            allowed = " or ".join(map(str, types))
            problems.append(f"{name}: expected {allowed}, found {reader.dtype(name)}")
    problems += [f"{name} is unknown" for name in present if name not in expected]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"{reader.directory} does not hold the {role} that config.json describes: "
            f"{'; '.join(problems[:5])}{more}"
        )

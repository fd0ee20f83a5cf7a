"""Checkpoints made by hand."""

import json
from pathlib import Path

from vapo_megatron.data.storage import sha256_of
from vapo_megatron.run.checkpoint.files import SUMS


def seal(directory: Path) -> Path:
    """Say of all files under a directory that they are what was written."""
    names = [p.relative_to(directory) for p in directory.rglob("*") if p.is_file()]
    sums = {str(name): sha256_of(directory / name) for name in names if name.name != SUMS}
    (directory / SUMS).write_text(json.dumps(sums))
    return directory

"""JSON Lines, as runs, evaluations and data sets have them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read(file: Path) -> list[Any]:
    """The value of each line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, rows: Iterable[Any]) -> None:
    """A line for each value."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

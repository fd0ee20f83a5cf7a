"""Rows of tools/gpu_smoke.py, and the table and the JSON that they are written as."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from pathlib import Path

HEADINGS = ("section", "case", "measured", "limit", "result")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    section: str
    case: str
    measured: str
    """For people; an error's text where the section failed."""
    limit: str = ""
    """What decides; empty where nothing is decided but that it ran."""
    passed: bool = True
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    """The same for programs: seconds, bytes, FLOP/s, shares; units stand in the names."""


def judged(section: str, case: str, what: str, error: float, bound: float) -> Row:
    """Return a row that passes where an error is within its bound; NaN is not."""
    figures = {"error": error, "bound": bound}
    return Row(section, case, f"{what} {error:.2g}", f"{bound:.2g}", error <= bound, figures)


def markdown(machine: dict[str, str], rows: Sequence[Row]) -> str:
    """Return the line of versions and the table."""
    cells: list[tuple[str, ...]] = [HEADINGS]
    for row in rows:
        result = "ok" if row.passed else "FAILED"
        cells.append((row.section, row.case, row.measured, row.limit, result))
    clean = [[" ".join(cell.replace("|", "/").split()) for cell in line] for line in cells]
    widths = [max(len(line[i]) for line in clean) for i in range(len(HEADINGS))]
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in clean]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([", ".join(machine.values()), "", *lines, ""])


def write_report(directory: Path, machine: dict[str, str], rows: Sequence[Row]) -> None:
    """Write gpu_smoke.md and gpu_smoke.json."""
    (directory / "gpu_smoke.md").write_text(markdown(machine, rows))
    tree = {"machine": machine, "rows": [dataclasses.asdict(row) for row in rows]}
    (directory / "gpu_smoke.json").write_text(json.dumps(tree, indent=1) + "\n")


def machine(on_gpu: bool) -> dict[str, str]:
    """Return date, device and versions, each as it stands above the table."""
    import torch

    if on_gpu:
        properties = torch.cuda.get_device_properties(0)
        name = f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
    else:
        name = f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    titles = {"transformer-engine": "Transformer Engine"}
    versions = {}
    for package in ("torch", "megatron-core", "transformer-engine"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            versions[package] = f"{titles.get(package, package)} {version}"
    versions.setdefault("transformer-engine", "no Transformer Engine")
    return {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "python": f"Python {platform.python_version()}",
        **versions,
        **({"cuda": f"CUDA {torch.version.cuda}"} if on_gpu else {}),
    }

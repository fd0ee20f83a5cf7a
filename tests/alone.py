"""Code in a new interpreter, which has imported nothing else."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any


def printed_by(code: str, *arguments: Any, **more: Any) -> str:
    """What it prints, started in the repository. more: of subprocess.run."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=Path(__file__).resolve().parents[1], capture_output=True, text=True, **more,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(code: str, modules: tuple[str, ...], *arguments: Any) -> list[str]:
    """Those of the modules that it has loaded."""
    told = f"import sys\nprint(*[name for name in {modules} if name in sys.modules])"
    return printed_by(f"{textwrap.dedent(code)}\n{told}", *arguments).splitlines()[-1].split()

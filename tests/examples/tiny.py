"""What tests of the miniatures share: their modules, jobs that nobody ran, and whole runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "examples" / "tiny") not in sys.path:
    sys.path.insert(0, str(ROOT / "examples" / "tiny"))

from runner.jobs import Job, write_state  # noqa: E402


def write_lines(path: Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def leave(job: Job, rows=(), *, finished: bool = True, seconds: float = 1.0) -> None:
    """What a job leaves; rows: of its metrics.jsonl."""
    job.out.mkdir(parents=True, exist_ok=True)
    if job.num_steps:
        write_lines(job.out / "metrics.jsonl", rows)
    write_state(job, finished=finished, seconds=seconds)


def start(name: str, *arguments: object) -> subprocess.CompletedProcess:
    """Run a miniature's script."""
    return subprocess.run(
        ["bash", f"examples/run_{name}_tiny.sh", *map(str, arguments)], cwd=ROOT, text=True,
        capture_output=True, timeout=1500, env={**os.environ, "VAPO_PYTHON": sys.executable},
    )  # fmt: skip


def done(name: str, *arguments: object) -> str:
    """Return what a script that succeeds prints."""
    process = start(name, *arguments)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    return process.stdout

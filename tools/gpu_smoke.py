#!/usr/bin/env python3
"""Run the package on one GPU, in under 8 minutes, and print a table of what came of it.

python tools/gpu_smoke.py --out DIR                 on a GPU: every section, at full size
python tools/gpu_smoke.py --sections parity         some of them
python tools/gpu_smoke.py --device cpu --small      the same code on a CPU, at tiny sizes

Each section runs in a process of its own with a time limit, so that one that fails, crashes or
hangs costs its own row alone. docs/gpu.md says what each row means. Needs torch,
megatron-core, numpy, packaging, pydantic, PyYAML and safetensors; neither vLLM, nor Transformer
Engine, nor a model on disk.

Exit codes: 0 every row is ok; 1 some are not; 2 it cannot run here.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.smoke.report import Row, machine, markdown, write_report

NEEDED = {
    "torch": "torch",
    "megatron.core": "megatron-core",
    "numpy": "numpy",
    "packaging": "packaging",
    "pydantic": "pydantic",
    "yaml": "PyYAML",
    "safetensors": "safetensors",
}
"""Module -> package."""


class Section(NamedTuple):
    """What one process runs: function(sizes, directory, *arguments)."""

    module: str
    function: str
    limit_seconds: float
    """Longer is a failure; less where less of the budget is left."""
    arguments: tuple[str, ...] = ()
    on_cpu: bool = False
    """Always: it computes what a GPU is compared with."""


SECTIONS = {
    "attention": Section("tools.smoke.attention", "attention", 90),
    "reference": Section("tools.smoke.parity", "reference", 120, on_cpu=True),
    "parity": Section("tools.smoke.parity", "parity", 120),
    "logprobs": Section("tools.smoke.training", "logprobs", 60),
    "offload": Section("tools.smoke.offload", "offload", 60, ("Qwen2.5-0.5B",)),
    **{
        f"{role}-{size}": Section("tools.smoke.training", "updates", 90, (f"Qwen2.5-{size}", role))
        for size in ("0.5B", "1.5B", "7B")
        for role in ("actor", "critic")
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections, or be the process of one of them; return the exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.run_section:
        run_here(arguments)
    names = arguments.sections.split(",") if arguments.sections else list(SECTIONS)
    refusal = _refusal(arguments, names)
    if refusal:
        print(f"gpu_smoke: {refusal}", file=sys.stderr)
        return 2
    if "parity" in names and "reference" not in names:
        names.insert(names.index("parity"), "reference")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.budget
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="gpu_smoke_") as work:
        for number, name in enumerate(names, 1):
            print(f"[{number}/{len(names)}] {name} ...", end=" ", flush=True)
            start = time.monotonic()
            found = run_apart(name, SECTIONS[name], arguments, Path(work), deadline - start)
            rows += found
            failed = sum(not row.passed for row in found)
            outcome = f", {failed} FAILED" if failed else ""
            print(f"{time.monotonic() - start:.0f} s{outcome}", flush=True)
        if arguments.out:
            logs = [Path(work, f"{name}.log") for name in names]
            with open(arguments.out / "gpu_smoke.log", "wb") as together:
                for log in filter(Path.exists, logs):
                    together.write(f"==> {log.stem}\n".encode() + log.read_bytes())
    described = machine(arguments.device == "cuda")
    print(f"\n{markdown(described, rows)}", end="")
    if arguments.out:
        write_report(arguments.out, described, rows)
    return int(not all(row.passed for row in rows))


def run_apart(
    name: str, section: Section, arguments: argparse.Namespace, work: Path, left_seconds: float
) -> list[Row]:
    """Run a section in a process of its own; return its rows, or one that says why it failed.

    `work` holds the files that sections leave for each other, their rows and their logs.
    """
    if left_seconds <= 0:
        return [_failed(name, f"not run: the {arguments.budget:g} s of --budget are spent")]
    environment = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    environment.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    if section.on_cpu or arguments.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, __file__, "--run-section", json.dumps([name, *section])]
    command += ["--work", str(work), *["--small"] * arguments.small]
    limit = min(section.limit_seconds, left_seconds)
    with open(work / f"{name}.log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            reason = f"the process ended with code {process.wait(limit)} and no rows"
        except subprocess.TimeoutExpired:
            reason = f"longer than {limit:.0f} s"
        finally:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
    file = work / f"{name}.json"
    if not file.exists():
        return [_failed(name, reason)]
    return [Row(**tree) for tree in json.loads(file.read_text())]


def run_here(arguments: argparse.Namespace) -> None:
    """Be the process of one section: write its rows, or one row with its error; does not return."""
    from tools.smoke.sizes import FULL, SMALL

    name, *fields = json.loads(arguments.run_section)
    section = Section(*fields)
    sizes = SMALL if arguments.small else FULL
    try:
        function = getattr(importlib.import_module(section.module), section.function)
        rows = function(sizes, arguments.work, *section.arguments)
    except Exception as error:
        traceback.print_exc()
        first_line = (str(error).strip().splitlines() or [""])[0]
        rows = [_failed(name, f"{type(error).__name__}: {first_line[:300]}")]
    trees = [dataclasses.asdict(row) for row in rows]
    (arguments.work / f"{name}.json").write_text(json.dumps(trees))
    sys.stdout.flush()
    sys.stderr.flush()
    # A section that is done must not hang in NCCL's or CUDA's clean-up.
    os._exit(0)


def _refusal(arguments: argparse.Namespace, names: Sequence[str]) -> str:
    """Why the tool cannot do what it was asked for; empty where it can."""
    if not set(names) <= set(SECTIONS):
        return f"--sections={','.join(names)}: must be among {','.join(SECTIONS)}"
    if arguments.device == "cpu" and not arguments.small:
        return "--device=cpu needs --small: a CPU would take hours for the full sizes"
    if not arguments.budget > 0:
        return f"--budget={arguments.budget:g} must be positive"
    missing = [package for module, package in NEEDED.items() if not _is_installed(module)]
    if missing:
        return f"not installed here: {', '.join(missing)}; install with pip"
    if arguments.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return (
                f"torch {torch.__version__} finds no GPU here; --device cpu --small runs the same "
                "code at tiny sizes"
            )
    return ""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _failed(name: str, reason: str) -> Row:
    return Row(name, "", reason, "runs", passed=False)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--sections", help=f"some of {','.join(SECTIONS)}; default: all")
    parser.add_argument(
        "--budget", type=float, default=450.0, help="seconds for all sections (default 450)"
    )
    parser.add_argument("--out", type=Path, help="directory for gpu_smoke.md, .json and .log")
    parser.add_argument("--run-section", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())

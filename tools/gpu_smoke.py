#!/usr/bin/env python3
"""Run the package on a machine's GPUs, in under 10 minutes, and print a table of what came of it.

python tools/gpu_smoke.py --out DIR                 on a GPU: every section, at full size
python tools/gpu_smoke.py --sections parity,te      some of them
python tools/gpu_smoke.py --device cpu --small      the same code on a CPU, at tiny sizes
torchrun --nnodes 2 ... tools/gpu_smoke.py          NCCL's bandwidth between nodes, alone

Each section runs in processes of its own with a time limit, so that one that fails, crashes or
hangs costs its own row alone. docs/gpu.md says what each row means. Needs torch,
megatron-core, numpy, packaging, pydantic, PyYAML and safetensors, and no model on disk; what needs
vLLM, Transformer Engine or a second GPU is skipped without it.

Exit codes: 0 every row is ok; 1 some are not; 2 it cannot run here.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import importlib
import importlib.util
import json
import os
import signal
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
    """What a process runs: function(sizes, directory, *arguments), a list or a stream of rows."""

    module: str
    function: str
    limit_seconds: float
    """On a GPU; longer is a failure. Less where less of the budget is left."""
    arguments: tuple[str, ...] = ()
    on_cpu: bool = False
    """Always: it computes what a GPU is compared with."""
    on_all_gpus: bool = False
    """One process for each of 8, 4 or 2 GPUs; two on a CPU. Rank 0 has the rows."""
    needs: str = ""
    """The section that must run before, because it leaves files."""


_GRACE_SECONDS = 10
"""What a section's processes get to end once one has failed: they wait for it."""

SLOWER_ON_CPU = 4
"""So many times its limit a section may take on a CPU, which may be shared."""

SECTIONS = {
    "attention": Section("tools.smoke.attention", "attention", 90),
    "reference": Section("tools.smoke.parity", "reference", 120, on_cpu=True),
    "parity": Section("tools.smoke.parity", "parity", 120, needs="reference"),
    "te": Section("tools.smoke.te", "transformer_engine", 90, needs="reference"),
    "nccl": Section("tools.smoke.nccl", "nccl", 180, on_all_gpus=True, needs="reference"),
    "sampler": Section("tools.smoke.sampler", "sampler", 180),
    "step": Section("tools.smoke.step", "step", 180),
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
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return under_torchrun(arguments)
    for name in list(names):
        if SECTIONS[name].needs and SECTIONS[name].needs not in names[: names.index(name)]:
            names.insert(names.index(name), SECTIONS[name].needs)
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


def under_torchrun(arguments: argparse.Namespace) -> int:
    """Be one of torchrun's processes on several nodes; rank 0 prints the table."""
    from tools.smoke.network import network
    from tools.smoke.sizes import FULL, SMALL

    rows = list(network(SMALL if arguments.small else FULL, Path()))
    if os.environ["RANK"] == "0":
        described = machine(arguments.device == "cuda")
        print(f"\n{markdown(described, rows)}", end="", flush=True)
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            write_report(arguments.out, described, rows)
    return int(not all(row.passed for row in rows))


def run_apart(
    name: str, section: Section, arguments: argparse.Namespace, work: Path, left_seconds: float
) -> list[Row]:
    """Run a section in processes of its own; return its rows, and one for each that failed.

    `work` holds the files that sections leave for each other, their rows and their logs.
    """
    if left_seconds <= 0:
        return [_failed(name, f"not run: the {arguments.budget:g} s of --budget are spent")]
    slower = SLOWER_ON_CPU if arguments.device == "cpu" else 1
    limit = min(slower * section.limit_seconds, left_seconds)
    description = json.dumps([name, *section._replace(limit_seconds=limit)])
    command = [sys.executable, __file__, "--run-section", description]
    command += ["--work", str(work), *["--small"] * arguments.small]
    with open(work / f"{name}.log", "ab") as log, contextlib.ExitStack() as stack:
        processes = []
        for environment in _environments(section, arguments.device):
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(_end, process)
            processes.append(process)
        _wait(processes, limit)
        codes = [process.poll() for process in processes]
    rows: list[Row] = []
    for rank, code in enumerate(codes):
        found, is_complete = _read_rows(work / f"{name}.{rank}.json")
        rows += found
        if not is_complete:
            where = f"rank {rank}: " if len(codes) > 1 else ""
            rows.append(_failed(name, where + _reason(code, any(codes), limit, bool(found))))
    return rows


def _reason(code: int | None, another_failed: bool, limit_seconds: float, has_rows: bool) -> str:
    """Say why a process has not written all its rows; code: None where it had to be killed."""
    if code is not None:
        return f"the process ended with code {code} and no {'more ' * has_rows}rows"
    if another_failed:
        return f"stopped {_GRACE_SECONDS} s after another rank had failed"
    return f"longer than {limit_seconds:.0f} s"


def _environments(section: Section, device: str) -> list[dict[str, str]]:
    """Return the environment of each process, as torchrun would set it."""
    count = 1
    if section.on_all_gpus:
        count = 2 if device == "cpu" else _num_gpus()
    shared = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    shared.update(WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    # What NCCL finds wrong is in the log.
    shared.setdefault("NCCL_DEBUG", "WARN")
    if section.on_cpu or device == "cpu":
        shared["CUDA_VISIBLE_DEVICES"] = ""
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _num_gpus() -> int:
    """The largest of 8, 4, 2 and 1 GPUs that there are."""
    import torch

    return next(n for n in (8, 4, 2, 1) if n <= max(1, torch.cuda.device_count()))


def _wait(processes: Sequence[subprocess.Popen], limit_seconds: float) -> None:
    """Wait until all have ended; once one has failed, the others get _GRACE_SECONDS."""
    deadline = time.monotonic() + limit_seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        time.sleep(0.05)


def _end(process: subprocess.Popen) -> None:
    """Kill a process and those that it has started, unless they have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)


def _read_rows(file: Path) -> tuple[list[Row], bool]:
    """Return a process's rows so far, and whether they are all."""
    if not file.exists():
        return [], False
    tree = json.loads(file.read_text())
    return [Row(**row) for row in tree["rows"]], tree["is_complete"]


def run_here(arguments: argparse.Namespace) -> None:
    """Be a process of one section: write its rows as they come; does not return.

    An error is a row, too, and the exit code is then 1.
    """
    from tools.smoke.sizes import FULL, SMALL

    name, *fields = json.loads(arguments.run_section)
    section = Section(*fields)
    sizes = SMALL if arguments.small else FULL
    file = arguments.work / f"{name}.{os.environ['RANK']}.json"
    rows: list[Row] = []

    def write(is_complete: bool) -> None:
        trees = [dataclasses.asdict(row) for row in rows]
        part = file.with_suffix(".part")
        part.write_text(json.dumps({"rows": trees, "is_complete": is_complete}))
        part.replace(file)

    # A hang leaves its stack in the log; repeated, because the first may come during a slow start.
    faulthandler.dump_traceback_later(max(1.0, section.limit_seconds - 5), repeat=True)
    code = 0
    try:
        function = getattr(importlib.import_module(section.module), section.function)
        for row in function(sizes, arguments.work, *section.arguments):
            rows.append(row)
            write(is_complete=False)
    except Exception as error:
        traceback.print_exc()
        first_line = (str(error).strip().splitlines() or [""])[0]
        where = f"rank {os.environ['RANK']}: " if os.environ["WORLD_SIZE"] != "1" else ""
        rows.append(_failed(name, f"{where}{type(error).__name__}: {first_line[:300]}"))
        code = 1
    write(is_complete=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # A section that is done must not hang in NCCL's or CUDA's clean-up.
    os._exit(code)


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

        from vapo_megatron.errors import ConfigError
        from vapo_megatron.parallel import libraries

        try:
            libraries.check_driver()
        except ConfigError as error:
            return str(error)
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
        "--budget", type=float, default=570.0, help="seconds for all sections (default 570)"
    )
    parser.add_argument("--out", type=Path, help="directory for gpu_smoke.md, .json and .log")
    parser.add_argument("--run-section", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())

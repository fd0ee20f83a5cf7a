"""Options of `vapo plan`: names, types and help."""

from __future__ import annotations

import argparse
import math
import re

from vapo_megatron.models.known import KNOWN_MODELS
from vapo_megatron.planning.cluster import GPUS, Cluster
from vapo_megatron.planning.ranking import RECOMPUTE
from vapo_megatron.planning.workload import SPREAD

SHARES = ("matmul", "attention", "memory", "decode", "nvlink", "network", "pcie")


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def speed(text: str) -> float:
    """Parse a number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value} must be more than 0")
    return value


def size(text: str) -> int:
    """Parse bytes: 80GB is 80e9, 80GiB is 80 * 2**30."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GB|GiB|TB)", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} must read like 80GB, 141GB or 79.6GiB")
    unit = {"gb": 10**9, "gib": 2**30, "tb": 10**12}[found[2].lower()]
    value = int(float(found[1]) * unit)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} must be more than 0")
    return value


def fraction(text: str) -> float:
    """Parse a number in (0, 1]."""
    value = speed(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{value} must be at most 1")
    return value


def share(text: str) -> tuple[str, float]:
    """Parse NAME=X."""
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if name not in SHARES or not 0 < number <= 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} must read NAME=X with X in (0, 1] and NAME one of {', '.join(SHARES)}"
        )
    return f"{name}_share", number


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of a plan, in groups."""
    add_model(parser)
    parser.add_argument(
        "--top", type=positive, default=12, metavar="N",
        help="layouts in the table (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--details", type=positive, default=1, metavar="N",
        help="layouts shown with each phase's bytes and seconds (default: %(default)s)",
    )  # fmt: skip
    add_cluster(parser.add_argument_group("cluster"))
    add_workload(parser.add_argument_group("workload (default: the configuration's)"))
    add_layout(parser.add_argument_group("layout (in brackets: what is tried by default)"))


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add --model."""
    known = ", ".join(KNOWN_MODELS)
    parser.add_argument(
        "--model", required=True, help=f"HF directory or its config.json, or one of {known}"
    )


def add_cluster(group: argparse._ArgumentGroup) -> None:
    """Add what the job runs on."""
    defaults = Cluster(num_gpus=1)
    group.add_argument("--gpus", type=positive, required=True, metavar="N", help="in the job")
    group.add_argument(
        "--gpus-per-node", type=positive, default=8, metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--gpu", choices=GPUS, default="H100", help="data sheet to use (default: %(default)s)"
    )
    group.add_argument("--gpu-memory", type=size, metavar="80GB", help="default: the data sheet's")
    group.add_argument(
        "--host-memory", type=size, metavar="2TB", help="per node (default: unlimited)"
    )
    for name, unit, what in (
        ("tflops", "TFLOP/s", "dense bfloat16 (default: the data sheet's)"),
        ("hbm", "GB/s", "GPU memory (default: the data sheet's)"),
        ("nvlink", "GB/s", "per GPU, both directions together (default: the data sheet's)"),
        ("network", "GB/s", "per GPU, each direction (default: that of NVIDIA's DGX)"),
        ("pcie", "GB/s", "per GPU, each direction (default: the data sheet's)"),
        (
            "storage",
            "GB/s",
            f"written by the job (default: {defaults.storage_gb_per_second:g})",
        ),
    ):
        group.add_argument(f"--{name}", type=speed, metavar=unit, help=what)
    values = ", ".join(f"{name} {getattr(defaults, f'{name}_share'):g}" for name in SHARES)
    group.add_argument(
        "--share",
        type=share,
        action="append",
        default=[],
        metavar="NAME=X",
        help=f"fraction of a peak that is reached; may be repeated (default: {values})",
    )


def add_workload(group: argparse._ArgumentGroup) -> None:
    """Add what a step does."""
    group.add_argument(
        "--config", action="append", default=[], metavar="FILE",
        help="YAML of the run; its layout is ignored; may be repeated",
    )  # fmt: skip
    for option, what in (
        ("--responses", "responses per step"),
        ("--group-size", "responses per prompt"),
        ("--mini-batch", "responses per update"),
        ("--max-prompt", "tokens of the longest prompt"),
        ("--max-response", "tokens of the longest response"),
        ("--prompt", "mean tokens of a prompt (default: 256)"),
        ("--response", "mean tokens of a response (default: half of the longest)"),
    ):
        group.add_argument(option, type=positive, metavar="N", help=what)
    group.add_argument(
        "--spread", type=speed, default=SPREAD, metavar="X",
        help="standard deviation of the log of the response lengths (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--vllm-sequences",
        type=positive,
        metavar="N",
        help="that a replica samples at once",
    )
    group.add_argument(
        "--no-critic", action="store_true", help="as with GRPO (default: the configuration's)"
    )
    group.add_argument(
        "--reference",
        action="store_true",
        help="with a KL term to a reference policy (default: the configuration's)",
    )


def add_layout(group: argparse._ArgumentGroup) -> None:
    """Add what is searched for unless it is given."""
    for option, what in (
        ("--tp", "the trainer's tensor parallelism (powers of two within a node)"),
        ("--pp", "the trainer's pipeline parallelism"),
        ("--vpp", "model chunks per pipeline rank (1, 2, 4)"),
        ("--vllm-tp", "tensor parallelism of a vLLM replica (powers of two within a node)"),
        ("--max-tokens", "tokens of a microbatch (half, once and twice the longest sequence)"),
    ):
        group.add_argument(option, type=positive, metavar="N", help=what)
    group.add_argument("--recompute", choices=RECOMPUTE, help="activation recomputation")
    group.add_argument("--offload", choices=("yes", "no"), help="idle models to host memory")
    group.add_argument(
        "--vllm-share",
        type=fraction,
        metavar="X",
        help="rollout.gpu_memory_utilization (the largest that fits, up to 0.9)",
    )


def add_reshard(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vapo plan reshard`."""
    add_model(parser)
    for option, number in (("--nodes", 16), ("--gpus-per-node", 8)):
        parser.add_argument(
            option, type=positive, default=number, metavar="N", help="default: %(default)s"
        )
    for option, what in (
        ("--tp", "the trainer's tensor parallelism"),
        ("--pp", "the trainer's pipeline parallelism"),
        ("--vllm-tp", "tensor parallelism of a vLLM replica"),
    ):
        parser.add_argument(option, type=positive, required=True, metavar="N", help=what)
    parser.add_argument(
        "--vpp",
        type=positive,
        default=1,
        metavar="N",
        help="model chunks per pipeline rank (default: 1)",
    )
    for option, default, what in (
        ("--nvlink", 900.0, "per GPU, both directions together"),
        ("--network", 50.0, "per GPU, each direction"),
    ):
        parser.add_argument(
            option, type=speed, default=default, metavar="GB/s",
            help=f"{what} (default: %(default)s)",
        )  # fmt: skip
    parser.add_argument("--per-rank", action="store_true", help="print the bytes of every rank")

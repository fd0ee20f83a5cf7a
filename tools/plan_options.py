"""Options of tools/plan.py: what they are called, what they take, and what --help says of them."""

from __future__ import annotations

import argparse
import math
import re
from typing import NoReturn

from vapo_megatron.models.known import KNOWN_MODELS
from vapo_megatron.planning.cluster import GPUS, Cluster
from vapo_megatron.planning.ranking import RECOMPUTE
from vapo_megatron.planning.workload import SPREAD

SHARES = ("matmul", "attention", "memory", "decode", "nvlink", "network", "pcie")


class Parser(argparse.ArgumentParser):
    """Tells a mistake as every other one is told: in one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print what argparse found, without the usage."""
        self.exit(2, f"plan: {message}; --help shows what there is\n")


def positive(text: str) -> int:
    """Read a number of things of which there is at least one."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def speed(text: str) -> float:
    """Read a bandwidth, or another number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value} must be more than 0")
    return value


def size(text: str) -> int:
    """Read bytes: 80GB are 80e9, 80GiB are 80 * 2**30."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GB|GiB|TB)", text, re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} must read like 80GB, 141GB or 79.6GiB")
    unit = {"gb": 10**9, "gib": 2**30, "tb": 10**12}[found[2].lower()]
    value = int(float(found[1]) * unit)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} must be more than 0")
    return value


def fraction(text: str) -> float:
    """Read a share of something."""
    value = speed(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{value} must be at most 1")
    return value


def share(text: str) -> tuple[str, float]:
    """Read NAME=X."""
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
    """Describe the options of a plan."""
    add_model(parser)
    parser.add_argument("--top", type=positive, default=12, help="rows (default: %(default)s)")
    parser.add_argument(
        "--details", type=positive, default=1, metavar="N",
        help="rows of which each phase's bytes and seconds are shown (default: %(default)s)",
    )  # fmt: skip
    add_cluster(parser.add_argument_group("cluster"))
    add_workload(parser.add_argument_group("workload (default: the configuration's)"))
    add_layout(
        parser.add_argument_group("layout (in brackets: what is tried where nothing is given)")
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the option that says which model runs."""
    known = ", ".join(KNOWN_MODELS)
    parser.add_argument(
        "--model", required=True, help=f"HF directory or its config.json, or one of {known}"
    )


def add_cluster(group: argparse._ArgumentGroup) -> None:
    """Add what a job runs on."""
    defaults = Cluster(num_gpus=1)
    group.add_argument("--gpus", type=positive, required=True, help="of the whole job")
    group.add_argument(
        "--gpus-per-node", type=positive, default=8, metavar="N", help="default: %(default)s"
    )
    group.add_argument(
        "--gpu", choices=GPUS, default="H100", help="whose data sheet (default: %(default)s)"
    )
    group.add_argument("--gpu-memory", type=size, metavar="80GB", help="default: the data sheet's")
    group.add_argument(
        "--host-memory", type=size, metavar="2TB", help="of a node (default: enough)"
    )
    for name, unit, what in (
        ("tflops", "TFLOP/s", "dense bfloat16 (default: the data sheet's)"),
        ("hbm", "GB/s", "a GPU's memory (default: the data sheet's)"),
        ("nvlink", "GB/s", "of a GPU, both ways together (default: the data sheet's)"),
        ("network", "GB/s", "of a GPU, each way (default: of NVIDIA's DGX of it)"),
        ("pcie", "GB/s", "of a GPU, each way (default: the data sheet's)"),
        ("storage", "GB/s", f"of the job, written (default: {defaults.storage_gb_per_second:g})"),
    ):
        group.add_argument(f"--{name}", type=speed, metavar=unit, help=what)
    values = ", ".join(f"{name} {getattr(defaults, f'{name}_share'):g}" for name in SHARES)
    group.add_argument(
        "--share",
        type=share,
        action="append",
        default=[],
        metavar="NAME=X",
        help=f"share of a peak that is reached (default: {values})",
    )


def add_workload(group: argparse._ArgumentGroup) -> None:
    """Add what a step does."""
    group.add_argument(
        "--config", action="append", default=[], metavar="FILE",
        help="YAML of the run; its layout is left out of account",
    )  # fmt: skip
    for option, what in (
        ("--responses", "responses in a step"),
        ("--group-size", "responses to a prompt"),
        ("--mini-batch", "responses in an update"),
        ("--max-prompt", "tokens of the longest prompt"),
        ("--max-response", "tokens of the longest response"),
        ("--prompt", "tokens of a prompt, mean (default: 256)"),
        ("--response", "tokens of a response, mean (default: half of the longest)"),
    ):
        group.add_argument(option, type=positive, metavar="N", help=what)
    group.add_argument(
        "--spread", type=speed, default=SPREAD, metavar="X",
        help="of the responses' lengths: standard deviation of their logarithm (default: "
        "%(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--vllm-sequences", type=positive, metavar="N", help="that a replica samples at once"
    )
    group.add_argument(
        "--no-critic", action="store_true", help="as in GRPO (default: the configuration's)"
    )
    group.add_argument(
        "--reference",
        action="store_true",
        help="a KL to a reference policy (default: the configuration's)",
    )


def add_layout(group: argparse._ArgumentGroup) -> None:
    """Add what can be chosen instead of searched for."""
    for option, what in (
        ("--tp", "the trainer's tensor parallelism (powers of two within a node)"),
        ("--pp", "the trainer's pipeline parallelism"),
        ("--vpp", "model chunks of each rank (1, 2, 4)"),
        ("--vllm-tp", "ranks of one vLLM replica (powers of two within a node)"),
        ("--max-tokens", "budget of a microbatch (half, once and twice the longest sequence)"),
    ):
        group.add_argument(option, type=positive, metavar="N", help=what)
    group.add_argument("--recompute", choices=RECOMPUTE, help="activations computed again")
    group.add_argument("--offload", choices=("yes", "no"), help="what is not at work to hosts")
    group.add_argument(
        "--vllm-share",
        type=fraction,
        metavar="X",
        help="rollout.gpu_memory_utilization (the largest up to .9 that fits)",
    )


def add_reshard(parser: argparse.ArgumentParser) -> None:
    """Describe the subcommand."""
    add_model(parser)
    parser.add_argument("--nodes", type=positive, default=16, help="default: %(default)s")
    parser.add_argument("--gpus-per-node", type=positive, default=8, help="default: %(default)s")
    for option, what in (
        ("--tp", "the trainer's tensor parallelism"),
        ("--pp", "the trainer's pipeline parallelism"),
        ("--vllm-tp", "ranks of one vLLM replica"),
    ):
        parser.add_argument(option, type=positive, required=True, help=what)
    parser.add_argument(
        "--vpp", type=positive, default=1, help="model chunks of each rank (default: 1)"
    )
    for option, default, what in (
        ("--nvlink", 900.0, "of one GPU, both directions together"),
        ("--network", 50.0, "of one GPU, each way"),
    ):
        parser.add_argument(
            option, type=speed, default=default, metavar="GB/s",
            help=f"{what} (default: %(default)s)",
        )  # fmt: skip
    parser.add_argument("--per-rank", action="store_true", help="print each rank's bytes")

"""Options of `vapo plan`: names, types and help."""

from __future__ import annotations

import argparse
import contextlib
import math
import re

from vapo_megatron.cli.command import add_values
from vapo_megatron.models.known import KNOWN_MODELS
from vapo_megatron.planning.cluster import GPUS, Cluster
from vapo_megatron.planning.ranking import RECOMPUTE
from vapo_megatron.planning.workload import (
    SPREAD,
    TYPICAL_OBSERVATION_TOKENS,
    TYPICAL_TURNS,
)

PLACEMENTS = ("colocated", "disaggregated")
SHARES = ("matmul", "attention", "memory", "decode", "nvlink", "network", "pcie")


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    return at_least(1, text)


def natural(text: str) -> int:
    """Parse an integer of at least 0."""
    return at_least(0, text)


def at_least(least: int, text: str) -> int:
    """Parse an integer that is not less."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} must be at least {least}")
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
    with contextlib.suppress(argparse.ArgumentTypeError):
        if name in SHARES:
            return f"{name}_share", fraction(value)
    raise argparse.ArgumentTypeError(
        f"{text!r} must read NAME=X with X in (0, 1] and NAME one of {', '.join(SHARES)}"
    )


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vapo plan`, in groups."""
    add_model(parser)
    parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value",
        help="of the run's configuration, such as model.lora.rank=32",
    )  # fmt: skip
    add_values(
        parser, positive, "N",
        ("--top", 12, "layouts in the table (default: %(default)s)"),
        ("--details", 1,
         "layouts shown with each phase's bytes and seconds (default: %(default)s)"),
    )  # fmt: skip
    add_cluster(parser.add_argument_group("cluster"))
    add_workload(parser.add_argument_group("workload (default: the configuration's)"))
    add_layout(parser.add_argument_group("layout (in brackets: what is tried by default)"))
    add_placement(parser.add_argument_group("placement (default: the configuration's)"))


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add --model."""
    known = ", ".join(KNOWN_MODELS)
    parser.add_argument(
        "--model", required=True, help=f"HF directory or its config.json, or one of {known}"
    )


def add_cluster(group: argparse._ArgumentGroup) -> None:
    """Add the job's GPUs, hosts, network and storage."""
    defaults = Cluster(num_gpus=1)
    add_values(group, positive, "N", ("--gpus", None, "in the job"), required=True)
    add_values(group, positive, "N", ("--gpus-per-node", 8, "default: %(default)s"))
    group.add_argument(
        "--gpu", choices=GPUS, default="H100", help="data sheet to use (default: %(default)s)"
    )
    add_values(group, size, "80GB", ("--gpu-memory", None, "default: the data sheet's"))
    add_values(group, size, "2TB", ("--host-memory", None, "per node (default: unlimited)"))
    add_values(
        group, speed, "TFLOP/s", ("--tflops", None, "dense bfloat16 (default: the data sheet's)")
    )
    add_values(
        group, speed, "GB/s",
        ("--hbm", None, "GPU memory (default: the data sheet's)"),
        ("--nvlink", None, "per GPU, both directions together (default: the data sheet's)"),
        ("--network", None, "per GPU, each direction (default: that of NVIDIA's DGX)"),
        ("--pcie", None, "per GPU, each direction (default: the data sheet's)"),
        ("--storage", defaults.storage_gb_per_second, "written by the job (default: %(default)g)"),
    )  # fmt: skip
    values = ", ".join(f"{name} {getattr(defaults, f'{name}_share'):g}" for name in SHARES)
    group.add_argument(
        "--share", type=share, action="append", default=[], metavar="NAME=X",
        help=f"fraction of a peak that is reached; may be repeated (default: {values})",
    )  # fmt: skip


def add_workload(group: argparse._ArgumentGroup) -> None:
    """Add the batch sizes and lengths of a step, and the models that it needs."""
    group.add_argument(
        "--config", action="append", default=[], metavar="FILE",
        help="YAML of the run; its layout is ignored; may be repeated",
    )  # fmt: skip
    add_values(
        group, positive, "N",
        ("--responses", None, "responses per step"),
        ("--group-size", None, "responses per prompt"),
        ("--mini-batch", None, "responses per update"),
        ("--max-prompt", None, "tokens of the longest prompt"),
        ("--max-response", None, "tokens of the longest response"),
        ("--prompt", None, "mean tokens of a prompt (default: 256)"),
        ("--response", None, "mean tokens of a response (default: half of the longest)"),
        ("--observations", None,
         "mean tokens of an episode's observations, which --max-response counts too (default: "
         f"{TYPICAL_OBSERVATION_TOKENS} for each turn but the last)"),
    )  # fmt: skip
    group.add_argument(
        "--turns", type=speed, metavar="X",
        help=f"mean turns of an episode (default: {TYPICAL_TURNS} with an environment, or 1)",
    )  # fmt: skip
    group.add_argument(
        "--spread", type=speed, default=SPREAD, metavar="X",
        help="standard deviation of the log of the response lengths (default: %(default)s)",
    )  # fmt: skip
    add_values(group, positive, "N", ("--vllm-sequences", None, "that a replica samples at once"))
    group.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), help="vLLM's keys and values")
    group.add_argument(
        "--reward-model", metavar="MODEL",
        help="with a reward model, named as --model (default: the configuration's)",
    )  # fmt: skip
    for option, what in (
        ("--no-critic", "as with GRPO"),
        ("--reference", "with a KL term to a reference policy"),
    ):
        group.add_argument(
            option, action="store_true", help=f"{what} (default: the configuration's)"
        )


def add_layout(group: argparse._ArgumentGroup) -> None:
    """Add the fields that are searched unless they are given."""
    add_values(
        group, positive, "N",
        ("--tp", None, "the trainer's tensor parallelism (powers of two within a node)"),
        ("--cp", None,
         "the trainer's context parallelism (powers of two that leave a rank 16,384 tokens)"),
        ("--pp", None, "the trainer's pipeline parallelism"),
        ("--ep", None, "the trainer's expert parallelism (powers of two within four nodes)"),
        ("--vpp", None, "model chunks per pipeline rank (1, 2, 4)"),
        ("--vllm-tp", None, "tensor parallelism of a vLLM replica (powers of two within a node)"),
        ("--max-tokens", None,
         "tokens of a microbatch (half, once and twice the longest sequence)"),
    )  # fmt: skip
    group.add_argument("--recompute", choices=RECOMPUTE, help="activation recomputation")
    layers = "recompute this many layers of each model chunk instead of all: recompute_method=block"
    add_values(group, positive, "N", ("--recompute-layers", None, layers))
    group.add_argument("--offload", choices=("yes", "no"), help="idle models to host memory")
    memory = "rollout.gpu_memory_utilization (the largest that fits, up to 0.9)"
    group.add_argument("--vllm-share", type=fraction, metavar="X", help=memory)


def add_placement(group: argparse._ArgumentGroup) -> None:
    """Add which GPUs sample, and with how old weights."""
    group.add_argument("--placement", choices=PLACEMENTS, help="where vLLM runs: rollout.placement")
    add_values(group, natural, "L", ("--lag", None, "steps that rollout workers may be ahead"))
    add_values(
        group, natural, "E",
        ("--carry-over", None, "groups in flight beyond a step's: rollout.carry_over_groups"),
        ("--max-lag", None, "steps after which a carried group is waited for (1)"),
    )  # fmt: skip
    what = "GPUs that only sample (default: the number with which a step is fastest)"
    add_values(group, positive, "S", ("--samplers", None, what))


def add_reshard(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vapo plan reshard`."""
    add_model(parser)
    add_values(
        parser, positive, "N",
        ("--nodes", 16, "default: %(default)s"),
        ("--gpus-per-node", 8, "default: %(default)s"),
    )  # fmt: skip
    add_values(
        parser, positive, "N",
        ("--tp", None, "the trainer's tensor parallelism"),
        ("--pp", None, "the trainer's pipeline parallelism"),
        ("--vllm-tp", None, "tensor parallelism of a vLLM replica"),
        required=True,
    )  # fmt: skip
    chunks = "model chunks per pipeline rank (default: %(default)s)"
    ranks = "ranks that share a layer's experts (default: %(default)s)"
    add_values(parser, positive, "N", ("--vpp", 1, chunks), ("--ep", 1, ranks))
    add_values(
        parser, speed, "GB/s",
        ("--nvlink", 900.0, "per GPU, both directions together (default: %(default)s)"),
        ("--network", 50.0, "per GPU, each direction (default: %(default)s)"),
    )  # fmt: skip
    parser.add_argument("--per-rank", action="store_true", help="print the bytes of every rank")

"""Time and peak memory of fused and unfused log-probabilities.

  vapo benchmark logprobs --tokens 4096 --vocab-size 152064 --hidden 896
  vapo benchmark logprobs --device cuda --dtype bfloat16

One forward and backward pass, from hidden states and the output weight to the gradients of both,
each in a process of its own. Peak memory is that of the process (VmHWM; on a GPU what torch
allocated) above hidden states, weight and the weight's gradient.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import statistics
import time
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vapo_megatron.cli.command import ProgressBar, add_values
from vapo_megatron.errors import ConfigError
from vapo_megatron.parallel.logprobs import linear_logprobs, vocab_parallel_logprobs

PATHS = ("fused", "plain", "vocab_parallel")


class Settings(NamedTuple):
    """One measurement."""

    path: str
    """fused: linear_logprobs; plain: hidden @ weight.T, log_softmax, gather; vocab_parallel:
    hidden @ weight.T, vocab_parallel_logprobs."""
    tokens: int
    vocab_size: int
    hidden: int
    dtype: str
    entropy: bool
    temperature: float
    threads: int
    device: str


class Measurement(NamedTuple):
    """Of one forward and backward pass."""

    seconds: float
    cpu_seconds: float
    """Of all threads of the process; hardly affected by other processes."""
    peak_bytes: int
    """Above hidden states, weight and the weight's gradient."""
    checksum: float
    """Mean log-probability: the paths compute the same."""


def measure(settings: Settings) -> Measurement:
    """Run one path once in this process, on a GPU after a warm-up."""
    torch.set_num_threads(settings.threads)
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    torch.manual_seed(0)
    shape = (settings.tokens, settings.hidden)
    hidden = torch.empty(shape, dtype=dtype, device=device).normal_()
    weight = torch.empty(settings.vocab_size, settings.hidden, dtype=dtype, device=device)
    weight.normal_(std=settings.hidden**-0.5)
    targets = torch.randint(settings.vocab_size, (settings.tokens,), device=device)
    upstream = torch.randn(2, settings.tokens, device=device)
    hidden.requires_grad_()
    weight.requires_grad_()
    if device.type == "cuda":
        _forward_backward(settings, hidden, weight, targets, upstream)
    # Counted as held; freed before the pass, whose own gradient takes its place.
    weight.grad = torch.zeros_like(weight).add_(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    held = _memory_bytes(device, peak=False)
    hidden.grad = weight.grad = None
    start, cpu_start = time.perf_counter(), time.process_time()
    logprobs = _forward_backward(settings, hidden, weight, targets, upstream)
    return Measurement(
        time.perf_counter() - start,
        time.process_time() - cpu_start,
        _memory_bytes(device, peak=True) - held,
        float(logprobs.detach().mean()),
    )


def _forward_backward(
    settings: Settings, hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor
) -> Tensor:
    """Set both gradients; [T] log-probabilities."""
    logprobs, entropy = _forward(settings, hidden, weight, targets)
    loss = (logprobs * upstream[0]).sum()
    if entropy is not None:
        loss = loss + (entropy * upstream[1]).sum()
    loss.backward()
    if hidden.is_cuda:
        torch.cuda.synchronize(hidden.device)
    return logprobs


def _forward(
    settings: Settings, hidden: Tensor, weight: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor | None]:
    keywords: dict[str, Any] = dict(
        vocab_size=settings.vocab_size,
        temperature=settings.temperature,
        with_entropy=settings.entropy,
    )
    if settings.path == "fused":
        return linear_logprobs(hidden, weight, targets, None, **keywords)
    logits = hidden @ weight.t()
    if settings.path == "vocab_parallel":
        return vocab_parallel_logprobs(logits, targets, None, **keywords)
    logits = logits.float()
    if settings.temperature != 1.0:
        logits = logits / settings.temperature
    log_p = torch.log_softmax(logits, -1)
    del logits
    logprobs = log_p.gather(1, targets[:, None])[:, 0]
    return logprobs, -(log_p.exp() * log_p).sum(-1) if settings.entropy else None


def _memory_bytes(device: torch.device, *, peak: bool) -> int:
    """Memory of this process, now or at its peak; on a GPU, of torch's tensors."""
    if device.type == "cuda":
        read = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
        return read(device)
    # Unlike getrusage's, this peak excludes the parent's.
    field = "VmHWM:" if peak else "VmRSS:"
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def logprobs(options: argparse.Namespace) -> None:
    """Print both paths' time and memory in alternating pairs, and the ratio of the medians."""
    settings = Settings(
        "fused", options.tokens, options.vocab_size, options.hidden, options.dtype,
        False, options.temperature, options.threads, options.device,
    )  # fmt: skip
    full = settings.tokens * settings.vocab_size * getattr(torch, settings.dtype).itemsize
    print(
        f"T = {settings.tokens}, V = {settings.vocab_size}, H = {settings.hidden}, TP 1, "
        f"{settings.dtype}, {settings.device}, {settings.threads} CPU thread(s), temperature "
        f"{settings.temperature:g}; the logits are {full / 1e6:.0f} MB"
    )
    entropies = {"yes": [True], "no": [False], "both": [False, True]}[options.entropy]
    done, total = 0, 2 * options.pairs * len(entropies)
    with ProgressBar("measurements") as bar:
        for entropy in entropies:
            seconds: dict[str, list[float]] = {"fused": [], options.unfused: []}
            for _ in range(options.pairs):
                for path, taken in seconds.items():
                    bar.show(done, total)
                    taken.append(_reported(settings._replace(path=path, entropy=entropy)).seconds)
                    done += 1
            fused, unfused = (statistics.median(taken) for taken in seconds.values())
            print(
                f"{'with' if entropy else 'without'} entropy: median {fused:.2f} s fused, "
                f"{unfused:.2f} s {options.unfused}, ratio {fused / unfused:.2f}",
                flush=True,
            )
        bar.show(done, total)


def _reported(settings: Settings) -> Measurement:
    """Measure in a new process, and print."""
    context = multiprocessing.get_context("spawn")
    try:
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            found = pool.submit(measure, settings).result()
    except BrokenProcessPool:
        raise ConfigError(
            f"the {settings.path} measurement was killed, most likely out of memory: it needs "
            "about five times the size of the logits; lower --tokens or --vocab-size"
        ) from None
    print(
        f"  {settings.path:<14} {'entropy' if settings.entropy else '':<8}"
        f"{found.peak_bytes / 1e6:9.0f} MB above inputs and the weight's gradient "
        f"{found.seconds:8.2f} s {found.cpu_seconds:8.2f} s of CPU   "
        f"mean logprob {found.checksum:.5f}",
        flush=True,
    )
    return found


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the subcommand `logprobs`."""
    command = commands.add_parser(
        "logprobs", help="fused log-probabilities against full logits", description=__doc__
    )
    add_values(
        command, int, "N",
        ("--tokens", 4096, "rows of the hidden states (default: %(default)s)"),
        ("--vocab-size", 152064, "rows of the output weight (default: %(default)s)"),
        ("--hidden", 896, "columns of both (default: %(default)s)"),
        ("--pairs", 3, "measurements of each path; the medians count (default: %(default)s)"),
        ("--threads", torch.get_num_threads(), "CPU threads (default: %(default)s)"),
    )  # fmt: skip
    for option, choices, what in (
        ("--dtype", ["float32", "bfloat16", "float16"], "of hidden states and weight"),
        ("--entropy", ["both", "yes", "no"], "with the entropy, without, or both"),
        ("--unfused", list(PATHS[1:]), "what to compare with"),
    ):
        command.add_argument(
            option, default=choices[0], choices=choices, help=f"{what} (default: {choices[0]})"
        )
    command.add_argument("--temperature", type=float, default=1.0, help="default: 1.0")
    command.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    command.set_defaults(measure=logprobs)

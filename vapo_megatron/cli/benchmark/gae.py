"""Time packed GAE against a loop over the tokens of a right-padded batch.

  vapo benchmark gae --responses 512 --tokens 2100000 --threads 1
  vapo benchmark gae --responses 8192 --tokens 83886080 --max-length 20480 --step

Both are also compared with the loop in float64. With --step, instead: what the CPU of one rank does
with each token of a step, from the exchange of responses to the metrics, with whitening and every
mask on; --responses and --tokens are that data-parallel rank's.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from vapo_megatron.algorithm.gae import decoupled_gae, length_adaptive_lambda
from vapo_megatron.cli.command import ProgressBar, add_values
from vapo_megatron.errors import ConfigError


def log_normal_lengths(
    num_responses: int, num_tokens: int, max_length: int, seed: int = 0
) -> Tensor:
    """int64 [B]: seeded log-normal lengths (sigma 0.8) in [1, max_length] that sum to num_tokens.

    Raises:
        ConfigError: num_tokens does not lie in [num_responses, num_responses * max_length].
    """
    if not num_responses <= num_tokens <= num_responses * max_length:
        raise ConfigError(
            f"--tokens={num_tokens} must lie between --responses={num_responses} and "
            f"--responses * --max-length={num_responses * max_length}; change one of them"
        )
    generator = torch.Generator().manual_seed(seed)
    shape = torch.empty(num_responses, dtype=torch.float64).log_normal_(0, 0.8, generator=generator)
    low, high = 0.0, float(num_tokens) * max_length / float(shape.min())
    for _ in range(200):
        scale = (low + high) / 2
        total = int((shape * scale).long().clamp(1, max_length).sum())
        low, high = (scale, high) if total <= num_tokens else (low, scale)
    lengths = (shape * low).long().clamp(1, max_length)
    missing = num_tokens - int(lengths.sum())
    room = max_length - lengths
    before = room.cumsum(0) - room
    return lengths + (missing - before).clamp(min=0).minimum(room)


def padded_loop(
    rewards: Tensor, values: Tensor, mask: Tensor, lam: Tensor
) -> tuple[Tensor, Tensor]:
    """GAE as a loop over the tokens of a right-padded batch; the mask skips the padding.

    Args:
        rewards, values, mask: [B, L] of one dtype; mask is 1 on tokens, 0 on padding.
        lam: [B].

    Returns:
        (advantages, returns = advantages + values), [B, L].
    """
    following_advantage = torch.zeros_like(lam)
    following_value = torch.zeros_like(lam)
    advantages = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + following_value - values[:, t]
        advantage = delta + lam * following_advantage
        keep = mask[:, t]
        following_value = keep * values[:, t] + (1 - keep) * following_value
        following_advantage = keep * advantage + (1 - keep) * following_advantage
        advantages.append(following_advantage)
    stacked = torch.stack(advantages[::-1], dim=1)
    return stacked, stacked + values


def seconds(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Wall-clock seconds of the fastest of several calls, after a warm-up call."""
    best = float("inf")
    for i in range(repeats + 1):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start) if i else best
    return best


def gae(options: argparse.Namespace) -> None:
    """Print the times of the padded loop and of packed GAE, their ratio and the error."""
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    lengths = log_normal_lengths(
        options.responses, options.tokens, options.max_length, options.seed
    )
    if options.step:
        # Imported here, because it loads megatron-core.
        from vapo_megatron.cli.benchmark import host_work

        host_work.show(lengths, options.seed)
        return
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    generator = torch.Generator().manual_seed(options.seed)
    values = torch.randn(options.tokens, generator=generator)
    rewards = torch.zeros(options.tokens)
    rewards[cu_seqlens[1:] - 1] = torch.randint(0, 2, lengths.shape, generator=generator) * 2.0 - 1
    lam = length_adaptive_lambda(lengths, 0.05)

    # The reference runs in float64; the timed loop gets the same inputs in float32.
    inside = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    padded = [torch.zeros(inside.shape).masked_scatter_(inside, x) for x in (rewards, values)]
    padded = [x.to(device) for x in (*padded, inside.float(), lam)]
    exact = padded_loop(*(x.double() for x in padded))[0].cpu()[inside]
    padded[-1] = padded[-1].float()
    packed = [x.to(device) for x in (rewards, values, cu_seqlens.int())]
    lam = lam.to(device)

    with ProgressBar("measurements") as bar:
        bar.show(0, 3)
        loop = seconds(lambda: padded_loop(*padded), options.loop_repeats, device)
        print(
            f"{options.responses} responses, {options.tokens} tokens, longest "
            f"{int(lengths.max())}, {device}, {torch.get_num_threads()} CPU thread(s)"
        )
        print(f"padded loop, one lambda          {loop * 1e3:9.1f} ms")
        ways = (("one lambda", lam), ("decoupled ", 1.0))
        for done, (name, lambda_critic) in enumerate(ways, start=1):
            bar.show(done, 3)
            compute = functools.partial(
                decoupled_gae, *packed, lambda_actor=lam, lambda_critic=lambda_critic
            )
            took = seconds(compute, options.repeats, device)
            error = (compute()[0].cpu().double() - exact).abs().max() / exact.abs().max()
            print(
                f"packed, {name}               {took * 1e3:9.1f} ms   {loop / took:6.1f} times "
                f"faster, largest error {float(error):.1e} of max|A|"
            )


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add the subcommand `gae`."""
    command = commands.add_parser(
        "gae", help="packed GAE against a padded, masked loop", description=__doc__
    )
    add_values(
        command, int, "N",
        ("--responses", 512, "in the batch (default: %(default)s)"),
        ("--tokens", 2_100_000, "of all responses together (default: %(default)s)"),
        ("--max-length", 16384, "tokens of the longest response (default: %(default)s)"),
        ("--repeats", 10, "of packed GAE; the fastest counts (default: %(default)s)"),
        ("--loop-repeats", 3, "of the loop; the fastest counts (default: %(default)s)"),
        ("--threads", 1, "CPU threads (default: %(default)s)"),
        ("--seed", 0, "of the lengths and values (default: %(default)s)"),
    )  # fmt: skip
    command.add_argument("--device", default="cpu", help="torch device (default: cpu)")
    command.add_argument(
        "--step",
        action="store_const",
        const="yes",
        help="time a step's whole work per token on the CPU instead",
    )
    command.set_defaults(measure=gae)

"""Sections of tools/gpu_smoke.py that time models: updates, and the fused log-probabilities.

MFU is model FLOPs over the seconds that they took and the GPU's bfloat16 peak. Model FLOPs
(vapo_megatron/planning/flops.py) are, forward, 2 for each matrix parameter and token, the output's
at the response tokens alone, and 4 * heads * head_dim for each layer and pair of tokens that
attends within its causal sequence; forward and backward three times that. An update also clips,
steps Adam over all parameters and casts them, whose seconds count and whose FLOPs do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from tools.smoke.models import build_role, make_config, random_batch, whole_mini_batch
from tools.smoke.report import Row, judged
from tools.smoke.sizes import Sizes
from vapo_megatron.cli.benchmark.logprobs import Measurement, Settings, measure
from vapo_megatron.config.phases import Role
from vapo_megatron.data.batch import RolloutBatch
from vapo_megatron.data.packing import attention_tokens, plan_step
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel import backend
from vapo_megatron.parallel.memory import PeakMemory
from vapo_megatron.planning import flops
from vapo_megatron.planning.memory import UPDATES
from vapo_megatron.planning.plan import peak_memory
from vapo_megatron.roles.actor import Actor
from vapo_megatron.roles.critic import Critic
from vapo_megatron.weights.table import parameter_count

Result = TypeVar("Result")


def updates(sizes: Sizes, directory: Path, name: str, role: Role) -> list[Row]:
    """Time a role of a published shape with random weights in bfloat16: forward, and update."""
    load = sizes.load
    shape, title = trained_shape(sizes, name)
    config = make_config("bfloat16", tokens_per_microbatch=load.tokens_per_microbatch)
    model = build_role(role, shape, config)
    batch, plan = planned(sizes, shape)
    # Once for libraries that start up and kernels that are compiled, then once for the clock.
    _, batch = forward(model, batch, plan)
    model.update([whole_mini_batch(batch, plan)])
    forward_seconds, batch = forward(model, batch, plan)
    mini_batches = [whole_mini_batch(batch, plan)] * load.num_updates
    seconds, metrics = timed(lambda: model.update(mini_batches))

    lengths = batch.sequence_lengths.tolist()
    outputs = int(batch.cu_seqlens[-1])
    forward_flops = flops.forward_flops(shape, lengths, role=role, num_outputs=outputs)
    once = _speed(sum(lengths), forward_flops, forward_seconds)
    update = _speed(sum(lengths), 3 * forward_flops, seconds / load.num_updates)
    peak, norm = PeakMemory().peak_bytes(), metrics[f"{role}/grad_norm"]
    update.update(peak_bytes=peak, grad_norm=norm)
    size = described_shape(title, shape, role)
    of_batch = f"{len(lengths)} responses, {min(lengths)} to {max(lengths)} tokens"
    update["planned_peak_bytes"] = planned_peak_bytes(sizes, shape, role)
    measured = f"{_described(update)}, peak {peak / 2**30:.1f} GiB (planned: "
    measured += f"{update['planned_peak_bytes'] / 2**30:.1f}), gradient norm {norm:.3g}"
    return [
        Row(role, f"{size}, forward of {of_batch}", _described(once), figures=once),
        Row(role, f"{size}, update", measured, "norm > 0", norm > 0, update),
    ]


def planned_peak_bytes(sizes: Sizes, shape: ModelShape, role: Role) -> float:
    """Return what `vapo plan` expects in a GPU while this role alone is on it and learns."""
    load = sizes.load
    config = make_config(
        "bfloat16",
        tokens_per_microbatch=load.tokens_per_microbatch,
        parallel={"offload": True},
        rollout={
            "max_prompt_tokens": load.prompt_tokens,
            "max_response_tokens": load.longest_response,
        },
    )
    return float(peak_memory(shape, config, gpu_bytes=0)[UPDATES[role]].total)


def trained_shape(sizes: Sizes, name: str) -> tuple[ModelShape, str]:
    """Return as much of a published model as this GPU can train, and what to call it."""
    if not torch.cuda.is_available():
        return sizes.trained_shape(name, None)
    return sizes.trained_shape(name, torch.cuda.get_device_properties(0).total_memory)


def described_shape(title: str, shape: ModelShape, role: Role) -> str:
    """Return the title with the number of parameters."""
    count = parameter_count(shape, value_head=role == "critic")
    return f"{title}, {count / 1e6:,.1f}M parameters"


def planned(sizes: Sizes, shape: ModelShape) -> tuple[RolloutBatch, list[list[int]]]:
    """Return a batch in the order of its plan, and the plan: one mini-batch, as the trainer's."""
    lengths = sizes.load.lengths
    plan = plan_step(
        [prompt + response for prompt, response in lengths],
        mini_batch_size=len(lengths),
        dp_size=1,
        max_tokens_per_microbatch=sizes.load.tokens_per_microbatch,
        seed=0,
        attention_tokens=attention_tokens(shape.hidden_size),
    )
    batch = random_batch([lengths[p] for p in plan.positions(0)], shape.vocab_size, seed=0)
    return batch, plan.mini_batches[0].ranks[0]


def logprobs(sizes: Sizes, directory: Path) -> list[Row]:
    """Compare fused log-probabilities with log_softmax of logits in full, forward and backward."""
    tokens, vocab_size, hidden = sizes.logprobs
    settings = Settings(
        "fused", tokens, vocab_size, hidden, "bfloat16", False, 1.0, torch.get_num_threads(),
        str(backend.device()),
    )  # fmt: skip
    rows, found = [], {}
    for path in ("fused", "plain"):
        found[path] = measure(settings._replace(path=path))
        rows.append(_described_logprobs(path, sizes, found[path]))
    # The plain path rounds products to bfloat16, on a CPU the fused one too, summed in another
    # order: a logit of up to 4, nearly all, may fall on the neighbouring number, at most 2^-6 away.
    # Over T tokens, three standard deviations:
    difference = abs(found["fused"].checksum - found["plain"].checksum)
    bound = 3 * 2.0**-6 / tokens**0.5
    rows.append(
        judged("logprobs", "mean, fused against plain", "difference in nats", difference, bound)
    )
    return rows


def _described_logprobs(path: str, sizes: Sizes, found: Measurement) -> Row:
    tokens, vocab_size, hidden = sizes.logprobs
    return Row(
        "logprobs",
        f"{path}, bfloat16, {tokens} tokens, vocabulary {vocab_size}, hidden {hidden}",
        f"{1e3 * found.seconds:.1f} ms forward and backward, {found.peak_bytes / 1e6:.0f} MB above "
        "inputs and the weight's gradient",
        figures={"seconds": found.seconds, "peak_bytes": found.peak_bytes},
    )


def forward(
    model: Actor | Critic, batch: RolloutBatch, plan: list[list[int]]
) -> tuple[float, RolloutBatch]:
    """Return (seconds, the batch with what was computed): old_logprobs, or values."""
    microbatches = whole_mini_batch(batch, plan).microbatches
    if isinstance(model, Actor):
        seconds, (logprobs, _) = timed(lambda: model.compute_logprobs(microbatches))
        return seconds, batch.replace(old_logprobs=logprobs)
    seconds, values = timed(lambda: model.compute_values(microbatches))
    return seconds, batch.replace(values=values)


def timed(call: Callable[[], Result]) -> tuple[float, Result]:
    """Return (seconds until the GPU is done, the call's result)."""
    backend.synchronize()
    start = time.perf_counter()
    result = call()
    backend.synchronize()
    return time.perf_counter() - start, result


def _speed(tokens: int, count: float, seconds: float) -> dict[str, float]:
    """What a pass over so many tokens comes to, with MFU where the GPU's peak is known."""
    speed = {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}
    speed["model_flops_per_second"] = count / seconds
    peak = (
        flops.bf16_peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    )
    if peak is not None:
        speed["mfu"] = flops.utilization(count, seconds, peak)
    return speed


def _described(speed: dict[str, float]) -> str:
    mfu = f"{100 * speed['mfu']:.1f} %" if "mfu" in speed else "unknown"
    return (
        f"{speed['tokens_per_second']:,.0f} tokens/s, "
        f"{speed['model_flops_per_second'] / 1e12:.3g} TFLOP/s, MFU {mfu}"
    )

"""Section of tools/gpu_smoke.py: vLLM beside the trainer, its sleep, and the weight sync into it.

Responses are sampled, sampled again, and a third time after sleep level 2, wake-up and sync: the
seeds and weights are the same, and so are the tokens. On a GPU two batches of the same requests
need not have the same bits; what the first two have in common says how much of it to expect.

vLLM's log-probabilities are compared with the trainer's in units of their spread. Both round to
bfloat16, forward alone, so that they may differ by the square root of two times what rounding
explains (parity.py). A third set of weights, which differs, is synced at the end: CUDA graphs that
still read the old ones would show.

On a CPU vLLM cannot sleep; its weights are overwritten with NaN instead.
"""

from __future__ import annotations

import importlib.util
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tools.smoke.models import (
    build_role,
    make_config,
    random_batch,
    start_groups,
    whole_mini_batch,
    write_random_hf,
)
from tools.smoke.parity import cuts, output_error, rounding_bound
from tools.smoke.report import Row, judged, skipped
from tools.smoke.sizes import EngineLoad, Sizes
from vapo_megatron.config import VapoConfig
from vapo_megatron.data.rollout import Prompt, Rollout
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel import groups
from vapo_megatron.parallel.minibatches import packed_multiple
from vapo_megatron.parallel.offload import is_on
from vapo_megatron.roles.actor import Actor
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.requests import SamplingSettings
from vapo_megatron.rollout.work import generate
from vapo_megatron.weights.reshard.sync import WeightSync

if TYPE_CHECKING:
    from vapo_megatron.rollout.vllm.engine import RolloutEngine

WHERE_NOT_THE_SAME = 0.8
"""Of the responses that are the same twice without sleep, this share must be the same after it;
all of them, where all are the same without."""


def missing_vllm() -> str:
    """Say that vLLM is not installed; empty where it is."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed; install the extra `gpu`"
    return ""


def sampler(sizes: Sizes, directory: Path) -> Iterator[Row]:
    """Sample, sleep, wake, sync and sample again."""
    if missing_vllm():
        yield skipped("sampler", missing_vllm())
        return
    load, shape = sizes.sampler, sizes.sampler.shape
    write_random_hf(directory / "sampler", shape, "actor", seed=3, dtype=torch.bfloat16)
    config = sampling_config(load, directory / "sampler")
    start_groups(config)
    before = used_bytes()
    engine, row = _built(config, shape)
    yield row
    yield _asleep(engine, load, before)
    actor = build_role("actor", shape, config)
    assert isinstance(actor, Actor)
    sync = WeightSync(shape, groups.current(), config.model, config.rollout, engine)
    chunks = actor.placed.chunks
    sync.publish(chunks, 0)
    first, again = (sample(engine, load, 0) for _ in range(2))
    share = same_share(first, again)
    yield _timed_row(engine, load, share)
    yield against_trainer("sampler", "first weights", actor, first)
    engine.sleep()
    fill_weights_with_nan(engine)
    sync.publish(chunks, 1)
    yield _slept(first, sample(engine, load, 1), share)
    engine.sleep()
    fill_weights_with_nan(engine)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.mul_(1.25)
    sync.publish(chunks, 2)
    yield against_trainer("sampler", "other weights", actor, sample(engine, load, 2))
    engine.shutdown()


def sampling_config(load: EngineLoad, hf_path: Path, **parallel: Any) -> VapoConfig:
    """Return a configuration that verifies every sync by checksums. parallel: its fields."""
    tp_size = parallel.pop("rollout_tp", 1)
    return make_config(
        "bfloat16", hf_path=str(hf_path), parallel=parallel,
        rollout={
            "tensor_model_parallel_size": tp_size, "kv_cache_bytes": load.kv_cache_bytes,
            "max_prompt_tokens": load.prompt_tokens, "max_response_tokens": load.response_tokens,
            "max_num_sequences": load.num_responses, "verify_sync_every": 1,
        },
    )  # fmt: skip


def build_engine(config: VapoConfig, shape: ModelShape) -> RolloutEngine:
    """Build vLLM; no token ends a response, and nothing is decoded. Collective."""
    from vapo_megatron.rollout.vllm.engine import RolloutEngine

    return RolloutEngine(
        str(config.model.hf_path), Inputs(shape), config.rollout,
        dtype=config.model.dtype, seed=0, offload=is_on(config.parallel),
    )  # fmt: skip


def sample(engine: RolloutEngine, load: EngineLoad, version: int) -> list[Rollout]:
    """Sample this replica's share of random prompts, the same in every call, at temperature 1."""
    prompts = []
    for index in range(load.num_responses):
        draw = random.Random(index)
        size = draw.randint(1, load.prompt_tokens)
        ids = tuple(draw.randrange(load.shape.vocab_size) for _ in range(size))
        prompts.append(Prompt(index, "", ids, ""))
    settings = SamplingSettings(1.0, 1.0, -1, load.response_tokens, "train")
    return generate(engine, prompts, [1] * len(prompts), 0, settings, version)


def same_share(first: Sequence[Rollout], second: Sequence[Rollout]) -> float:
    """Return the share of responses with the same tokens."""
    pairs = list(zip(first, second, strict=True))
    return sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs)


def against_trainer(section: str, case: str, actor: Actor, rollouts: Sequence[Rollout]) -> Row:
    """Judge vLLM's log-probabilities by the trainer's. Collective over the actor's ranks.

    Args:
        section, case: of the row.
        actor: with the weights that were sampled from.
        rollouts: the same on every rank.
    """
    ours = trainer_logprobs(actor, rollouts)
    theirs = torch.tensor([x for r in rollouts for x in r.logprobs])
    error = output_error(theirs[:, None], ours[:, None])
    bound = math.sqrt(2) * rounding_bound(actor.shape, actor.config.model.dtype, passes=1)
    difference = (theirs - ours).abs()
    row = judged(section, f"log-probabilities against the trainer's, {case}", "error", error, bound)
    row.figures.update(mean_nats=float(difference.mean()), max_nats=float(difference.max()))
    return row


def trainer_logprobs(actor: Actor, rollouts: Sequence[Rollout]) -> Tensor:
    """Return float32 [T]: the trainer's log-probabilities of all responses in order."""
    lengths = [(len(r.prompt.token_ids), len(r.token_ids)) for r in rollouts]
    tokens = [i for r in rollouts for i in (*r.prompt.token_ids, *r.token_ids)]
    batch = random_batch(lengths, actor.shape.vocab_size, seed=0)
    batch = batch.replace(tokens=torch.tensor(tokens))
    plan = [list(range(*bounds)) for bounds in cuts(len(rollouts), max(1, len(rollouts) // 8))]
    multiple = packed_multiple(actor.config.parallel, None)
    logprobs, _ = actor.compute_logprobs(whole_mini_batch(batch, plan, multiple).microbatches)
    return logprobs


def used_bytes() -> int:
    """Bytes of the GPU in use, whoever uses them; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def fill_weights_with_nan(engine: RolloutEngine) -> None:
    """Overwrite the weights of a sleeping engine where sleeping frees nothing: on a CPU."""
    if not torch.cuda.is_available():
        for weight in engine.live_weights().values():
            weight.tensor.fill_(torch.nan)


def _built(config: VapoConfig, shape: ModelShape) -> tuple[RolloutEngine, Row]:
    """Build the engine; on a GPU it must have captured CUDA graphs."""
    start = time.perf_counter()
    engine = build_engine(config, shape)
    seconds = time.perf_counter() - start
    from vllm.compilation.counter import compilation_counter

    graphs = compilation_counter.num_cudagraph_captured
    on_gpu = torch.cuda.is_available()
    figures = {"seconds": seconds, "cuda_graphs": float(graphs)}
    measured = f"{seconds:.0f} s, {graphs} CUDA graphs"
    limit = "CUDA graphs > 0" if on_gpu else ""
    return engine, Row("sampler", "vLLM starts", measured, limit, graphs > 0 or not on_gpu, figures)


def _asleep(engine: RolloutEngine, load: EngineLoad, before: int) -> Row:
    """Put the engine to sleep: its weights and cache must leave the GPU."""
    weights = sum(weight.tensor.nbytes for weight in engine.live_weights().values())
    awake = used_bytes()
    engine.sleep()
    fill_weights_with_nan(engine)
    left = used_bytes()
    wanted = 0.95 * (weights + load.kv_cache_bytes) if torch.cuda.is_available() else 0.0
    figures = {
        "before_bytes": float(before), "awake_bytes": float(awake), "asleep_bytes": float(left),
        "weight_bytes": float(weights), "cache_bytes": float(load.kv_cache_bytes),
    }  # fmt: skip
    measured = f"GPU in use {before / 1e9:.2f} GB, with vLLM {awake / 1e9:.2f}, asleep "
    measured += f"{left / 1e9:.2f}"
    limit = f"freed >= {wanted / 1e9:.2f} GB" if wanted else ""
    return Row("sampler", "sleep level 2", measured, limit, awake - left >= wanted, figures)


def _timed_row(engine: RolloutEngine, load: EngineLoad, share: float) -> Row:
    """Time a third call with the same weights."""
    start = time.perf_counter()
    rollouts = sample(engine, load, 0)
    seconds = time.perf_counter() - start
    rate = sum(len(r.token_ids) for r in rollouts) / seconds
    figures = {"same_share": share, "seconds": seconds, "tokens_per_second": rate}
    measured = f"{100 * share:.0f} % of the responses have the same tokens; {rate:,.0f} tokens/s"
    return Row("sampler", "generate twice, awake", measured, "> 0", share > 0, figures)


def _slept(before: Sequence[Rollout], after: Sequence[Rollout], awake_share: float) -> Row:
    """Judge what is sampled after sleep, wake-up and sync of the same weights."""
    share = same_share(before, after)
    wanted = 1.0 if awake_share == 1 else WHERE_NOT_THE_SAME * awake_share
    return Row(
        "sampler", "generate, sleep level 2, wake, sync, generate",
        f"{100 * share:.0f} % of the responses have the same tokens", f">= {100 * wanted:.0f} %",
        share >= wanted, {"same_share": share, "wanted_share": wanted},
    )  # fmt: skip

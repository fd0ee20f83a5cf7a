"""The worker processes of test_sync.py: Megatron models, and rollout workers to publish into."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.rollout.vllm import engine_jobs
from tests.rollout.vllm.poisoned_sleep import poison_sleep
from tests.weights.loaded import Layout, all_parameters, load, two_updates
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel import groups
from vapo_megatron.weights.export_hf import export_hf
from vapo_megatron.weights.reshard import sync as sync_module
from vapo_megatron.weights.reshard.plan import ENGINE, LiveWeight
from vapo_megatron.weights.reshard.sync import WeightSync

LAST_ROWS_OF_MLP = ("model.layers.3.mlp.down_proj.weight",
                    "model.layers.3.mlp.experts.routed_experts.w2_weight")  # fmt: skip
"""Of a dense model, and of one with experts."""


class Sampled(NamedTuple):
    """A sampler's weights and its outputs."""

    weights: dict[str, str]
    """Name -> hash of the bits, padding included."""
    responses: list[tuple[int, tuple[int, ...], tuple[float, ...]]]
    """(position, tokens, log-probabilities) of greedy responses of this replica."""


def _hashes(live: dict[str, LiveWeight]) -> dict[str, str]:
    return {
        name: hashlib.sha256(weight.tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, weight in live.items()
    }


def _sampled(engine: Any) -> Sampled:
    # Longer than a block of the KV cache, so that the prefix cache fills.
    ask = engine_jobs.prompts(2 * engine.num_replicas, length=150, vocab=300)
    settings = engine_jobs.settings(0, limit=12)
    engine.keeps_rollouts = True  # On each rank, to compare.
    rollouts = engine_jobs.generate(engine, ask, 1, 1, settings, engine.policy_version)
    responses = [(r.position, tuple(r.token_ids), tuple(r.logprobs)) for r in rollouts]
    return Sampled(_hashes(engine.live_weights()), responses)


def _tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(directory.glob("*.safetensors")):
        yield from load_file(file).items()


def _num_cached_blocks(engine: Any) -> int:
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    return len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)


def _updated(path: Path, layout: Layout) -> Any:
    """The directory's model in any layout, after an update that is the same in all of them."""
    loaded = load(str(path), layout)
    for _, parameter in all_parameters(loaded.chunks):
        parameter.data.mul_(-1.5)
    return loaded


def _sync_between(loaded: Any, engine: Any, config: Any) -> WeightSync:
    return WeightSync(loaded.shape, loaded.ranks, loaded.config.model, config.rollout, engine)


def layouts_into_vllm(
    tmp: Path, path: Path, rollout_tp: int, layouts: list[Layout], *overrides: str
) -> dict[str, Any]:
    """Load an export into a fresh engine, then publish every layout's weights into it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = engine_jobs.config(
        tmp, rollout_tp, f"parallel.world_size={world_size}", "rollout.sync_bucket_bytes=20000",
        "rollout.verify_sync_every=2", *overrides,
    )  # fmt: skip
    poison_sleep()
    engine = engine_jobs.build_engine(path, config)
    engine.sleep()
    loaded = _updated(path, layouts[0])
    export_hf(loaded.chunks, loaded.shape, loaded.ranks, tmp / "export", copy_from=str(path))
    groups.destroy()
    dist.barrier()
    engine.load_weights(_tensors(tmp / "export"), 0)
    found: dict[str, Any] = {"expected": _sampled(engine)}
    for number, layout in enumerate(layouts):
        engine.sleep()
        loaded = _updated(path, layout)
        sync = _sync_between(loaded, engine, config)
        sync.publish(loaded.chunks, 2 * number + 1)
        after_sleep = _sampled(engine)
        for weight in engine.live_weights().values():
            weight.tensor.fill_(torch.nan)
        cached = _num_cached_blocks(engine)
        sync.publish(loaded.chunks, 2 * number + 2)
        cached = (cached, _num_cached_blocks(engine))
        found[str(layout)] = (after_sleep, _sampled(engine), engine.policy_version, cached)
        if layout == layouts[-1]:
            if rank == world_size - 1:
                live = engine.live_weights()
                (name,) = live.keys() & {*LAST_ROWS_OF_MLP}
                live[name].tensor[-1, -1] += 1e-3
            found["damaged"] = engine_jobs.error_of(sync.verify, loaded.chunks)
        groups.destroy()
    engine.shutdown()
    dist.barrier()
    return found


class TensorEngine:
    """A sampler without vLLM: bare tensors, in vLLM's shapes for TP = 1."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], padding: dict[str, int]) -> None:
        self.version: int | None = None
        self.live = {
            name: LiveWeight(torch.full(size, torch.nan), padding.get(name, 0))
            for name, size in shapes.items()
        }

    @property
    def policy_version(self) -> int | None:
        return self.version

    def live_weights(self) -> dict[str, LiveWeight]:
        return self.live

    @contextlib.contextmanager
    def weights_replaced(self, policy_version: int) -> Any:
        self.version = None
        yield
        self.version = policy_version


def _small_engine() -> TensorEngine:
    """For write_tiny_hf(num_layers=1, tied=True)."""
    layer = "model.layers.0."
    return TensorEngine(
        {
            "model.embed_tokens.weight": (320, 64),
            layer + "self_attn.qkv_proj.weight": (128, 64),
            layer + "self_attn.qkv_proj.bias": (128,),
            layer + "self_attn.o_proj.weight": (64, 64),
            layer + "mlp.gate_up_proj.weight": (192, 64),
            layer + "mlp.down_proj.weight": (64, 96),
            layer + "input_layernorm.weight": (64,),
            layer + "post_attention_layernorm.weight": (64,),
            "model.norm.weight": (64,),
        },
        {"model.embed_tokens.weight": 20},
    )


def _config(tmp: Path, verify_every: int = 0) -> Any:
    return engine_jobs.config(tmp, 1, f"rollout.verify_sync_every={verify_every}")


def plans_that_do_not_fit(tmp: Path, path: Path) -> dict[str, str]:
    """Errors of a sync whose sampler or trainer does not match the plan."""
    rank = dist.get_rank()
    loaded = load(str(path), Layout(2, 1))
    config = _config(tmp)
    found = {}

    def error(engine: TensorEngine, **model: Any) -> str:
        sync = _sync_between(loaded, engine, config)
        sync._model = sync._model.model_copy(update=model)
        return engine_jobs.error_of(sync.publish, loaded.chunks, 1) + f" {engine.version}"

    engine = _small_engine()
    if rank == 1:
        engine.live["model.extra.weight"] = LiveWeight(torch.zeros(2, 3), 0)
    found["extra"] = error(engine)
    engine = _small_engine()
    del engine.live["model.norm.weight"]
    found["lacking"] = error(engine)
    engine = _small_engine()
    engine.live["model.norm.weight"] = LiveWeight(torch.zeros(64, dtype=torch.bfloat16), 0)
    found["type"] = error(engine)
    found["vocabulary"] = error(_small_engine(), make_vocab_size_divisible_by=1024)
    return found


def verified_versions(tmp: Path, path: Path) -> tuple[list[int], str, Any, float]:
    """Which versions are verified, and what happens when one arrives damaged."""
    loaded = load(str(path), Layout(2, 1))
    engine = _small_engine()
    sync = _sync_between(loaded, engine, _config(tmp, verify_every=3))
    compare, execute = sync_module.differences, sync_module.execute
    compared: list[int] = []

    def damaging(steps: Any, weights: Any, *rest: Any) -> int:
        count = execute(steps, weights, *rest)
        if dist.get_rank() == 0:
            weights[ENGINE, "model.norm.weight"][5] *= -1
        return count

    try:
        for version in range(4, 11):
            sync_module.differences = lambda *a, v=version: (compared.append(v), compare(*a))[1]
            received = sync.publish(loaded.chunks, version)["sync/received_bytes"]
        seen = list(compared)
        padding = engine.live["model.embed_tokens.weight"].tensor[300:].abs().max().item()
        sync_module.execute = damaging
        error = engine_jobs.error_of(sync.publish, loaded.chunks, 12)
    finally:
        sync_module.differences, sync_module.execute = compare, execute
    return seen, error, engine.version, received + padding


def updates(path: Path, overlap: bool) -> list[dict[str, str]]:
    """Two optimizer updates on 2 data-parallel ranks, each followed by a sync."""
    loaded = load(str(path), Layout(), overlap=overlap)
    engine = _small_engine()
    config = loaded.config
    sync = WeightSync(loaded.shape, loaded.ranks, config.model, config.rollout, engine)
    synced = []
    for version, chunks in enumerate(two_updates(loaded)):
        sync.publish(chunks, version)
        synced.append(_hashes(engine.live))
    return synced


def looked_up_afresh(tmp: Path, path: Path) -> str:
    """Verification finds that the sampler uses other tensors than were written to."""
    loaded = load(str(path), Layout(2, 1))
    engine = _small_engine()
    sync = _sync_between(loaded, engine, _config(tmp))
    sync.publish(loaded.chunks, 1)
    sync.verify(loaded.chunks)
    name = "model.norm.weight"
    engine.live[name] = LiveWeight(engine.live[name].tensor + 1, 0)
    return engine_jobs.error_of(sync.verify, loaded.chunks)


def between_sides(tmp: Path, path: Path, layout: Layout) -> dict[str, Any]:
    """Publish from trainers to rollout workers that are processes of their own."""
    from vapo_megatron.parallel import backend
    from vapo_megatron.rollout.disaggregated.staging import Staging

    rollout_workers = dist.get_world_size() - layout.world_size
    dist.destroy_process_group()
    worlds = backend.initialize_distributed(60, rollout_workers)
    config = _config(tmp)
    found: dict[str, Any] = {}
    if worlds.is_rollout_worker:
        engine = _small_engine()
        staging = Staging(engine)
        shape = read_model_shape(str(path))
        sync = WeightSync(shape, None, config.model, config.rollout, staging, worlds)
        compared: list[int] = []
        verify = sync.verify
        sync.verify = lambda chunks: compared.append(7) or verify(chunks)
        total = sync.publish((), 7)
        sync.publish((), 8)
        untouched = bool(torch.isnan(engine.live["model.norm.weight"].tensor).all())
        staging.load(7)
        first = {name: weight.tensor.clone() for name, weight in engine.live.items()}
        staging.forget_before(8)
        staging.load(8)
        elements = sum(
            w.tensor[: len(w.tensor) - w.padding_rows].numel() for w in engine.live.values()
        )
        sync.verify = verify
        staging.live_weights()["model.norm.weight"].tensor[3] += 1
        found = {
            "untouched": untouched, "first": first, "version": engine.version,
            "second": {name: weight.tensor for name, weight in engine.live.items()},
            "ratio": sync.received_bytes / (4 * elements), "compared": compared,
            "total": total["sync/received_bytes"] / (4 * elements),
            "error": engine_jobs.error_of(sync.verify, ()),
        }  # fmt: skip
    else:
        loaded = load(str(path), layout)
        model, rollout = loaded.config.model, config.rollout
        sync = WeightSync(loaded.shape, loaded.ranks, model, rollout, None, worlds)
        sync.publish(loaded.chunks, 7)
        for _, parameter in all_parameters(loaded.chunks):
            parameter.data.mul_(2)
        sync.publish(loaded.chunks, 8)
        error = engine_jobs.error_of(sync.verify, loaded.chunks)
        found = {"ratio": sync.received_bytes, "error": error}
    dist.barrier(group=worlds.group)
    worlds.close()
    return found

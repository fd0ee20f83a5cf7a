"""The worker processes of test_adapters.py: actors with adapters, and engines to publish into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.rollout.vllm import engine_jobs
from tests.rollout.vllm.poisoned_sleep import poison_sleep
from tests.weights.peft_directory import lora_fields


def published(
    tmp: Path, base: str, adapters: list[str], rollout_tp: int, layout: dict[str, Any], how: str
) -> dict[str, Any]:
    """Publish a directory after the other into one engine; what it samples, and bytes received.

    The engine is asleep before the last one alone.
    """
    from vapo_megatron.config import VapoConfig
    from vapo_megatron.models.hf_config import read_model_shape
    from vapo_megatron.parallel import groups
    from vapo_megatron.roles.actor import Actor
    from vapo_megatron.weights.export_hf import export_hf
    from vapo_megatron.weights.peft import export_adapters, load_adapters
    from vapo_megatron.weights.reshard.sync import WeightSync

    size = f"parallel.world_size={dist.get_world_size()}"
    rollout = [size, "rollout.verify_sync_every=1", "rollout.sync_bucket_bytes=20000"]
    tree = engine_jobs.config(tmp, rollout_tp, *rollout).model_dump()
    tree["rollout"]["adapter_sync"] = how
    tree["model"] |= {"lora": lora_fields(adapters[0]), "hf_path": base, "layer_spec": "local"}
    tree["parallel"] |= layout
    config = VapoConfig.model_validate(tree)
    poison_sleep()
    engine = engine_jobs.build_engine(Path(base), config)
    engine.sleep()
    ranks = groups.initialize(config.parallel)
    shape = read_model_shape(base)
    actor = Actor(shape, config, ranks, base)
    sync = WeightSync(shape, ranks, config.model, config.rollout, engine)
    ask = engine_jobs.prompts(2 * engine.num_replicas, length=150, vocab=300)
    found: dict[str, Any] = {"received": [], "sampled": []}
    for version, directory in enumerate(adapters):
        if version == len(adapters) - 1:
            engine.sleep()
        load_adapters(actor.placed.model, shape, directory, ranks, config.model.lora)
        metrics = sync.publish(actor.placed.chunks, version)
        found["received"].append(metrics["sync/received_bytes"])
        found["sampled"].append(_sampled(engine, ask, version))
    source = (actor.placed.chunks, shape, ranks)
    export_hf(*source, tmp / "merged", copy_from=base)
    export_adapters(*source, tmp / "exported", base, config.model.lora, step=3)
    if how == "adapter":
        # vLLM reads the directory itself, where it has no adapter of that number.
        from vllm.lora.request import LoRARequest

        engine._adapter.request = LoRARequest("exported", 2, str(tmp / "exported"))
        found["read"] = _sampled(engine, ask, version)
    found["ends"] = engine_jobs.error_of(_damage, engine, sync, actor.placed.chunks)
    groups.destroy()
    engine.shutdown()
    dist.barrier()
    return found


def _sampled(engine: Any, ask: list, version: int) -> list:
    engine.keeps_rollouts = True  # On each rank, to compare.
    rollouts = engine_jobs.generate(engine, ask, 1, 1, engine_jobs.settings(0, limit=12), version)
    return [(r.prompt.token_ids, tuple(r.token_ids), tuple(r.logprobs)) for r in rollouts]


def _damage(engine: Any, sync: Any, chunks: list[torch.nn.Module]) -> None:
    """Change one element of the last rank's engine, then compare."""
    if dist.get_rank() == dist.get_world_size() - 1:
        # The last is of the adapter if it is apart; a vocabulary's last rows would be padding.
        weight = [w for n, w in engine.live_weights().items() if "layers" in n][-1]
        weight.tensor.view(-1)[-1] += 1e-3
    sync.verify(chunks)

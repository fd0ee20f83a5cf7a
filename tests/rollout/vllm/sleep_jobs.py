"""What engines that sleep are asked to do; the tests of test_engine.py judge the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.rollout.vllm.engine_jobs import error_of, generate, prompts, settings

LONGER_THAN_A_BLOCK = 150
"""Tokens of a prompt. A block of the KV cache has 128: the prefix cache keeps the first ones."""


def woken_by_loading(engine: Any, now: list, then: list) -> dict[str, Any]:
    """Sleep with the weights `now`, wake with `then`: vLLM's own loaders replace them."""
    found: dict[str, Any] = {"events": []}
    core = engine._llm.llm_engine.engine_core.engine_core
    worker, scheduler = core.model_executor.driver_worker.worker, core.scheduler
    original = (
        worker.sleep,
        worker.wake_up,
        scheduler.reset_prefix_cache,
        engine._model().load_weights,
    )

    def sleep(level):
        found["events"].append(f"sleep {level}")
        original[0](level)

    def wake_up(tags):
        found["events"].append(f"wake {tags}")
        original[1](tags)

    def reset(*arguments, **named):
        found["events"].append("reset")
        return original[2](*arguments, **named)

    def load(tensors):
        found["events"].append("load")
        return original[3](tensors)

    worker.sleep, worker.wake_up, scheduler.reset_prefix_cache = sleep, wake_up, reset
    engine._model().load_weights = load
    ask = [*prompts(4), *prompts(8, length=LONGER_THAN_A_BLOCK)[4:]]
    engine.load_weights(now, 5)
    generate(engine, ask, 1, 0, settings(0), 5)
    del found["events"][:]
    engine.sleep()
    engine.sleep()
    found["asleep"] = error_of(generate, engine, ask, 1, 0, settings(0), 5)
    found["paused"] = core.is_scheduler_paused()
    found["lost"] = [bool(w.tensor.isnan().all()) for w in engine.live_weights().values()]
    engine.load_weights(then, 6)
    found["between"] = sorted(core.model_executor.sleeping_tags)
    found["awake"] = generate(engine, ask, 1, 0, settings(0), 6)
    found["running"] = not core.is_sleeping()
    engine.load_weights(now, 7)
    found["once"] = list(found["events"])
    engine.sleep()
    engine.load_weights(then, 8)
    engine.sleep()
    found["half awake, then asleep"] = sorted(core.model_executor.sleeping_tags)
    return found


def woken_by_sync(engine: Any, path: Path, rollout: Any) -> list[list]:
    """Sample; sleep, sync the same weights from a trainer with TP=2 and sample again, twice."""
    from tests.weights.loaded import Layout, load
    from vapo_megatron.weights.reshard.sync import WeightSync

    loaded = load(str(path), Layout(tp=2))
    sync = WeightSync(loaded.shape, loaded.ranks, loaded.config.model, rollout, engine)
    ask = [*prompts(4), *prompts(8, length=LONGER_THAN_A_BLOCK)[4:]]
    sampled = [generate(engine, ask, 1, 1, settings(), engine.policy_version)]
    for version in (10, 11):
        engine.sleep()
        sync.publish(loaded.chunks, version)
        sampled.append(generate(engine, ask, 1, 1, settings(), version))
    return sampled

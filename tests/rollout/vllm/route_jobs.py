"""What the worker processes of test_returned_routes.py do with real engines; tests judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.rollout.vllm import turn_jobs
from tests.rollout.vllm.engine_jobs import (
    build_engine,
    config,
    generate,
    prompts,
    settings,
    weights,
)
from tests.rollout.vllm.partial_jobs import go_on
from tests.rollout.vllm.sleep_jobs import LONGER_THAN_A_BLOCK
from vapo_megatron.rollout.requests import start_groups

R3 = "algorithm.router_replay=r3"
TOKEN_BYTES = 2 * 2 * 2 * 64 * 4
"""Of the KV cache: 2 layers, keys and values of 2 heads of 64 float32."""


def returned(tmp: Path, first_path: Path, second_path: Path, tp_size: int) -> dict[str, Any]:
    """Rollouts of every kind, by what they show, of this rank."""
    overrides = (
        R3, f"rollout.max_num_sequences={turn_jobs.AT_ONCE}",
        f"rollout.max_response_tokens={turn_jobs.MAX_TOKENS}",
        f"rollout.expert_parallel={'true' if tp_size > 1 else 'false'}",
    )  # fmt: skip
    engine = build_engine(first_path, config(tmp, tp_size, *overrides))
    engine.load_weights(weights(first_path), 3)
    # Groups that share whole blocks of the prefix cache, and short prompts.
    ask = [*prompts(2, 4, LONGER_THAN_A_BLOCK), *prompts(8, 1)[2:]]
    sizes = [4, 4, *[1] * 6]
    found: dict[str, Any] = {"groups": sample(engine, ask, sizes, settings(), 3)}
    found["evaluation"] = sample(engine, ask, sizes, settings(0, role="evaluation"), 3)
    engine.stop_token_ids = turn_jobs.STOPS
    found["turns"] = list(turn_jobs.play(engine, turn_jobs.Delayed(1, 0.03)).values())
    engine.stop_token_ids = (2,)
    begun = [r for group in start_groups(ask, sizes, seed=5, step=2, role="train") for r in group]
    begun = begun[engine.replica :: engine.num_replicas]
    seeds = {request.rollout.position: request.seed for request in begun}
    asked: list[int] = []
    _, cut = go_on(
        engine, [request.rollout for request in begun], seeds, 3,
        lambda count: (asked.append(count), len(asked) > 9)[1],
    )  # fmt: skip
    found["cut"] = cut
    engine.load_weights(weights(second_path), 4)
    found["gone on"] = go_on(engine, cut, seeds, 4, lambda count: False)[0]
    engine.shutdown()
    return found


def sample(engine: Any, ask: list, sizes: list, asked: Any, version: int) -> list:
    from vapo_megatron.rollout.work import generate as groups

    return groups(engine, ask, sizes, 1, asked, version)


def preempted(tmp: Path, path: Path) -> tuple[int, list]:
    """How often a response was preempted in a KV cache of 8 blocks, and the responses."""
    engine = build_engine(
        path, config(tmp, 1, R3, f"rollout.kv_cache_bytes={8 * 128 * TOKEN_BYTES}")
    )
    engine.load_weights(weights(path), 0)
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    preempt, count = scheduler._preempt_request, []
    scheduler._preempt_request = lambda *a, **k: (count.append(1), preempt(*a, **k))[1]
    found = generate(engine, prompts(30, length=110), 1, 1, settings(), 0)
    engine.shutdown()
    return len(count), found

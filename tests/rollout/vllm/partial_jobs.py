"""What the worker process of test_partial.py does with a real engine; tests judge the results."""

from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path
from typing import Any

from tests.rollout.vllm.engine_jobs import (
    SEED,
    build_engine,
    config,
    error_of,
    generate,
    prompts,
    settings,
    weights,
)
from tests.rollout.vllm.sleep_jobs import LONGER_THAN_A_BLOCK
from vapo_megatron.data.rollout import Rollout
from vapo_megatron.rollout.requests import Request, Work, start_groups

COUNT, AT_ONCE, CUT_AT, WHOLE = 12, 8, 9, 5


def go_on(engine, asked, seeds, version, is_enough) -> tuple[list, list]:
    """(finished, interrupted), by position."""
    finished: list[Rollout] = []
    parts = iter([[Request(r, seeds[r.position]) for r in asked]])
    work = Work(
        lambda room: next(parts, []), finished.append, len(asked), lambda: is_enough(len(finished))
    )
    interrupted = engine.run(work, settings(), version)
    return sorted(finished, key=lambda r: r.position), interrupted


def cached_blocks(engine: Any) -> int:
    """Blocks of keys and values that another request could take."""
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    return len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)


def cut_and_gone_on(tmp: Path, first_path: Path, second_path: Path) -> dict[str, Any]:
    """World 1: responses that are cut, by a number of whole ones and by a number of tokens."""
    from vapo_megatron.rollout.vllm.completions import request

    engine = build_engine(
        first_path,
        config(tmp, 1, "parallel.world_size=1", f"rollout.max_num_sequences={AT_ONCE}"),
    )
    engine.load_weights(weights(first_path), 3)
    ask = prompts(COUNT, length=LONGER_THAN_A_BLOCK)
    groups = start_groups(ask, [1] * COUNT, seed=SEED, step=1, role="train", policy_version=3)
    begun, seeds, *_ = zip(*(request for group in groups for request in group))
    found: dict[str, Any] = {"plain": generate(engine, ask, 1, 1, settings(), 3)}
    found["uncut"] = go_on(engine, begun, seeds, 3, lambda count: False)
    found["by count"] = go_on(engine, begun, seeds, 3, lambda count: count >= WHOLE)
    found["again"] = go_on(engine, begun, seeds, 3, lambda count: count >= WHOLE)

    asked: list[int] = []
    tokens = lambda count: (asked.append(count), len(asked) > CUT_AT)[1]  # noqa: E731
    early, cut = go_on(engine, begun, seeds, 3, tokens)
    found["by tokens"] = early, cut
    found["same weights"] = go_on(engine, cut, seeds, 3, lambda count: False)
    some = [dataclasses.replace(begun[0], token_ids=array("i", [5] * n)) for n in (0, 7)]
    found["seeds"] = [request(settings(), (2,), Request(r, 12)).seed for r in some]
    found["left"] = engine._llm.llm_engine.has_unfinished_requests()

    asked.clear()
    _, cut = go_on(engine, begun, seeds, 3, tokens)
    before = cached_blocks(engine)
    engine.load_weights(weights(second_path), 4)
    found["cached"] = before, cached_blocks(engine)
    found["other weights"] = go_on(engine, cut, seeds, 4, lambda count: False)
    found["evaluation"] = generate(engine, ask, 1, 1, settings(0), 4)
    found["older version"] = error_of(go_on, engine, cut, seeds, 3, lambda count: False)
    engine.shutdown()
    return found

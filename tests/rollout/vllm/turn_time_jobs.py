"""How long episodes take beside responses of one turn, in one engine; test_turns_time.py judges."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.rollout.vllm.engine_jobs import SEED, build_engine, config, prompts, settings, weights
from vapo_megatron.data.rollout import Rollout
from vapo_megatron.rollout.requests import Request, Work, start_groups
from vapo_megatron.rollout.turns import Answer, Limits, Turns

COUNT, TURNS, ACTION, MOST = 64, 5, 28, 32
"""Episodes, their turns, tokens of an action, and most tokens of an observation."""
LENGTH = TURNS * (ACTION + MOST)


class Counted(Turns):
    """Lets a turn end after ACTION tokens as if it had stopped there, so that all have as many."""

    def _ended(self, rollout: Rollout) -> None:
        self._wait(dataclasses.replace(rollout, truncated=False))


class Said:
    """Answers after a number of seconds, which is drawn for each call."""

    def __init__(self, most: int, seconds: Callable[[random.Random], float]) -> None:
        self._most, self._seconds = most, seconds
        self._due: list[tuple[float, int, Answer]] = []
        self.chains = dict.fromkeys(range(COUNT), 0.0)
        self.inserted = dict.fromkeys(range(COUNT), 0)

    def ask(self, rollout: Rollout, seed: int) -> None:
        turn, position = len(rollout.token_ids) // ACTION, rollout.position
        if turn == 0:
            answer, delay = Answer(position, prompt={"token_ids": rollout.prompt.token_ids}), 0.0
        else:
            draw = random.Random(f"{position} {turn}")
            size = 0 if turn == TURNS else draw.randrange(self._most + 1)
            answer = Answer(position, [draw.randrange(13, 64)] * size, is_over=turn == TURNS)
            delay = self._seconds(draw)
            self.inserted[position] += size
        self.chains[position] += delay
        self._due.append((time.monotonic() + delay, len(self._due), answer))

    def answers(self, wait_seconds: float) -> list[Answer]:
        deadline = time.monotonic() + wait_seconds
        while min(self._due)[0] > time.monotonic() < deadline:
            time.sleep(0.001)
        now = time.monotonic()
        came = [answer for due, _, answer in sorted(self._due, key=lambda e: e[:2]) if due <= now]
        self._due = [each for each in self._due if each[0] > now]
        return came

    def finish(self, rollout: Rollout) -> Rollout:
        return rollout


def begun() -> list[Request]:
    groups = start_groups(
        prompts(COUNT), [1] * COUNT, seed=SEED, step=1, role="train", policy_version=3
    )
    return [request for (request,) in groups]


def sampled(engine: Any, work: Callable[[Work], Work], requests: Sequence[Request]) -> float:
    """Seconds that it takes."""
    parts, found, start = iter([requests]), list[Rollout](), time.monotonic()
    engine.run(
        work(Work(lambda room: next(parts, []), found.append, COUNT)), settings(limit=LENGTH), 3
    )
    seconds = time.monotonic() - start
    assert len(found) == COUNT
    return seconds


def timed(tmp: Path, path: Path, rounds: int) -> dict[str, float]:
    """Medians of ratios, each of runs one after the other, and seconds with slow calls."""
    engine = build_engine(
        path,
        config(
            tmp, 1, "parallel.world_size=1", f"rollout.max_num_sequences={COUNT}",
            f"rollout.max_response_tokens={LENGTH}", "rollout.kv_cache_bytes=400000000",
            "rollout.vllm_args={block_size: 32}",
        ),
    )  # fmt: skip
    engine.stop_token_ids = ()
    engine.load_weights(weights(path), 3)

    def plain(lengths: Sequence[int]) -> float:
        requests = [r._replace(max_tokens=n) for r, n in zip(begun(), lengths, strict=True)]
        return sampled(engine, lambda work: work, requests)

    def turned(most: int, seconds: Callable[[random.Random], float] = lambda draw: 0.0) -> Any:
        said = Said(most, seconds)
        limits = Limits(TURNS, ACTION, LENGTH)

        def with_turns(work: Work) -> Work:
            return Counted(work, said, engine.told, limits, engine.at_once).work

        return sampled(engine, with_turns, begun()), said

    actions = [TURNS * ACTION] * COUNT
    plain(actions)
    _, said = turned(MOST)
    whole = [TURNS * ACTION + said.inserted[position] for position in range(COUNT)]
    ratios: dict[str, list[float]] = {"as many tokens": [], "actions alone": [], "empty": []}
    for _ in range(rounds):
        alone, all_of_them = plain(actions), plain(whole)
        with_text, without = turned(MOST)[0], turned(0)[0]
        ratios["as many tokens"].append(with_text / all_of_them)
        ratios["actions alone"].append(with_text / alone)
        ratios["empty"].append(without / alone)
    slow, said = turned(MOST, lambda draw: float(draw.random() < 0.1))
    found = {name: statistics.median(values) for name, values in ratios.items()}
    chain, calls = max(said.chains.values()), sum(said.chains.values())
    engine.shutdown()
    return {**found, "instant": with_text, "slow": slow, "chain": chain, "calls": calls}

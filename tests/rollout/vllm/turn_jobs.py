"""What the worker processes of test_turns.py do with real engines; the tests judge the results."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.rollout.vllm.engine_jobs import SEED, build_engine, config, prompts, settings, weights
from vapo_megatron.data.rollout import Rollout
from vapo_megatron.rollout.requests import Request, Work, start_groups
from vapo_megatron.rollout.turns import Answer, Limits, Turns, with_turn
from vapo_megatron.rollout.work import divide

COUNT, AT_ONCE, MAX_TOKENS = 64, 12, 160
STOPS = tuple(range(3, 13))
"""Of 64 tokens: actions have about six."""
LIMITS = Limits(max_turns=4, max_action_tokens=24, max_tokens=MAX_TOKENS)


def answer(rollout: Rollout) -> Answer:
    """What the environment of a test says: it follows from what the model has sampled."""
    tokens = len(rollout.token_ids)
    if not tokens:
        said = [20 + i for i in range(rollout.position % 3)]
        prompt = {"token_ids": (*rollout.prompt.token_ids, *said)}
        return Answer(rollout.position, prompt=prompt)
    draw = random.Random(f"{rollout.position} {tokens} {rollout.token_ids[-1]}")
    ids = [draw.randrange(13, 64) for _ in range(draw.randrange(33))]
    return Answer(rollout.position, ids, draw.random(), is_over=draw.random() < 0.2)


class Delayed:
    """Answers after delays that are drawn at random; 0: at once, in the order of the questions."""

    def __init__(self, seed: int, longest_seconds: float) -> None:
        self._draw, self._longest = random.Random(seed), longest_seconds
        self._due: list[tuple[float, Answer]] = []
        self.order: list[int] = []
        self.alive: set[int] = set()

    def ask(self, rollout: Rollout, seed: int) -> None:
        self.alive.add(rollout.position)
        delay = self._draw.random() * self._longest
        self._due.append((time.monotonic() + delay, answer(rollout)))

    def answers(self, wait_seconds: float) -> list[Answer]:
        deadline = time.monotonic() + wait_seconds
        while self._due and min(self._due)[0] > min(time.monotonic(), deadline):
            if time.monotonic() >= deadline:
                return []
            time.sleep(0.001)
        now = time.monotonic()
        came = [each for due, each in sorted(self._due, key=lambda pair: pair[0]) if due <= now]
        self._due = [pair for pair in self._due if pair[0] > now]
        self.order += [each.position for each in came]
        self.alive -= {each.position for each in came if each.is_over}
        return came

    def finish(self, rollout: Rollout) -> Rollout:
        if rollout.episode is not None:
            self.alive.remove(rollout.position)
        return dataclasses.replace(rollout, episode=None)


def begun(count: int = COUNT) -> list[list[Request]]:
    return start_groups(
        prompts(count), [1] * count, seed=SEED, step=1, role="train", policy_version=3
    )


def play(engine: Any, players: Any, limits: Limits = LIMITS) -> dict[int, Rollout]:
    """This replica's share of the episodes, by position."""
    mine = divide(begun(), engine.num_replicas, COUNT)[0][engine.replica]
    parts, found = iter([mine]), list[Rollout]()
    work = Work(lambda room: next(parts, []), found.append, len(mine))
    players = players if engine.keeps_rollouts else None
    turns = Turns(work, players, engine.told, limits, engine.at_once)
    assert engine.run(turns.work, settings(limit=MAX_TOKENS), 3) == []
    assert players is None or not players.alive, "the environment knows of every end"
    # Only the first rank's players have taken it away.
    found = [dataclasses.replace(rollout, episode=None) for rollout in found]
    return {rollout.position: rollout for rollout in found}


def one_by_one(engine: Any, limits: Limits = LIMITS) -> dict[int, Rollout]:
    """All episodes by a plain loop: each turn is sent alone, and waited for."""
    found = {}
    for (request,) in begun():
        ids = answer(request.rollout).prompt
        prompt = dataclasses.replace(request.rollout.prompt, **ids)
        rollout = dataclasses.replace(request.rollout, prompt=prompt)
        while True:
            ended = list[Rollout]()
            parts = iter([[Request(rollout, request.seed, limits.max_action_tokens)]])
            engine.run(
                Work(lambda room, parts=parts: next(parts, []), ended.append, 1),
                settings(limit=MAX_TOKENS), 3,
            )  # fmt: skip
            (rollout,) = ended
            said = answer(rollout)
            rollout = with_turn(rollout, 0.0 if rollout.truncated else said.reward)
            if rollout.truncated or said.is_over:
                break
            after = rollout.answered(said.ids)
            left = limits.max_tokens - len(after.token_ids) - after.num_inserted
            if left < 1 or len(after.turns) == limits.max_turns:
                break
            rollout = after
        found[rollout.position] = rollout
    return found


def episodes(tmp: Path, path: Path, tp_size: int) -> dict[str, Any]:
    """Play the same episodes with different delays, and one by one."""
    world = dist.get_world_size()
    overrides = (
        f"parallel.world_size={world}", f"rollout.max_num_sequences={AT_ONCE}",
        f"rollout.max_response_tokens={MAX_TOKENS}",
    )  # fmt: skip
    engine = build_engine(path, config(tmp, tp_size, *overrides))
    engine.stop_token_ids = STOPS
    engine.load_weights(weights(path), 3)
    found: dict[str, Any] = {"plain": one_by_one(engine)}
    for seed, longest in ((0, 0.0), (1, 0.03), (2, 0.1), (3, 0.3)):
        players = Delayed(seed + 10 * engine.replica, longest)
        found[f"up to {longest} s"] = play(engine, players), players.order
    engine.shutdown()
    return found

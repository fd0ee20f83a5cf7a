"""Scored rollouts as arrays: what dump.py writes into its files.

Fields that no response uses are omitted, so that an ordinary dump stays small.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vapo_megatron.data.columns import SAMPLED
from vapo_megatron.data.rollout import (
    CUTS,
    STATUSES,
    Episode,
    Prompt,
    Rollout,
    ScoredRollout,
    Turn,
)


def _to_bytes(text: str | None) -> np.ndarray:
    """Encode as UTF-8; a lone surrogate, which JSON allows, survives the round trip."""
    return np.frombuffer((text or "").encode("utf-8", "surrogatepass"), np.uint8)


def _to_text(part: np.ndarray) -> str:
    return part.tobytes().decode("utf-8", "surrogatepass")


def _of_episode(episode: Episode | None) -> list[int]:
    return [CUTS.index(episode.cut), episode.failed, episode.failed_calls] if episode else []


def _to_episode(part: np.ndarray) -> Episode | None:
    if not len(part):
        return None
    cut, failed, failed_calls = part.tolist()
    return Episode(CUTS[cut], bool(failed), failed_calls=failed_calls)


def _to_routes(parts: list[np.ndarray], per_token: np.ndarray | None) -> list[np.ndarray | None]:
    if per_token is None:
        return [None] * len(parts)
    return [part.reshape(-1, int(per_token[0])) if len(part) else None for part in parts]


OF_PROMPT: dict[str, tuple[type, Callable[[Prompt], Any]]] = {
    "prompt_tokens": (np.int32, lambda p: p.token_ids),
    "prompt_text": (np.uint8, lambda p: _to_bytes(p.text)),
    "answer": (np.uint8, lambda p: _to_bytes(p.answer)),
    "critic_prompt_tokens": (np.int32, lambda p: p.critic_token_ids or ()),
    "verifier": (np.uint8, lambda p: _to_bytes(p.problem.verifier)),
    "source": (np.uint8, lambda p: _to_bytes(p.source)),
}
"""Name -> dtype and numbers, of which each prompt has its own count: see `name`_lengths."""
OF_RESPONSE: dict[str, tuple[type, Callable[[ScoredRollout], Any]]] = {
    "tokens": (np.int32, lambda s: s.rollout.token_ids),
    # None of given responses.
    "logprobs": (np.float32, lambda s: s.rollout.logprobs or ()),
    "text": (np.uint8, lambda s: _to_bytes(s.text)),
    # Version, tokens, version, ... where several versions sampled it.
    "segments": (np.int32, lambda s: np.ravel(s.rollout.segments)),
    # Before which token how many others are inserted; and these.
    "inserted_at": (np.int32, lambda s: np.ravel([(at, len(i)) for at, i in s.rollout.inserted])),
    # Token, reward, token, ... earned on the way.
    "token_rewards": (np.float64, lambda s: np.ravel(s.token_rewards)),
    # Last token, reward, last token, ... of each turn.
    "turns": (np.float64, lambda s: np.ravel(s.rollout.turns)),
    # What cut it, whether its environment failed, and wrong calls; not how long that took.
    "episode": (np.int64, lambda s: _of_episode(s.rollout.episode)),
    # routes_per_token has how many of these each token has.
    "routes": (np.uint8, lambda s: () if s.rollout.routes is None else s.rollout.routes.ravel()),
    "metrics": (np.uint8, lambda s: _to_bytes(json.dumps(s.metrics) if s.metrics else None)),
}
"""The same of each response."""
ALWAYS = ("prompt_tokens", "prompt_text", "answer", "tokens", "logprobs", "text")
"""Those that are written even if all are empty; of given responses no log-probabilities."""


def pack(scored: Sequence[ScoredRollout]) -> dict[str, np.ndarray]:
    """Return arrays with one entry per prompt or response, and concatenated ones with lengths."""
    rollouts = [item.rollout for item in scored]
    number: dict[Prompt, int] = {}
    prompt = [number.setdefault(r.prompt, len(number)) for r in rollouts]
    arrays: dict[str, np.ndarray] = {
        "prompt_index": np.array([p.index for p in number], np.int64),
        "prompt": np.array(prompt, np.int32),
        "sample": np.array([r.sample for r in rollouts], np.int32),
        "position": np.array([r.position for r in rollouts], np.int32),
        "policy_version": np.array([r.policy_version for r in rollouts], np.int32),
        "truncated": np.array([r.truncated for r in rollouts], np.bool_),
        "status": np.array([STATUSES.index(item.status) for item in scored], np.uint8),
        "reward": np.array([item.reward for item in scored], np.float64),
    }
    # Which other numbers per token there are is the same for all of a rank's responses.
    for name in rollouts[0].columns:
        parts = [np.array(r.columns[name]) for r in rollouts]
        arrays[f"column_{name}"] = np.concatenate(parts)
    is_given = rollouts[0].logprobs is None
    assert all((r.logprobs is None) == is_given for r in rollouts), "given or sampled, not both"
    tables: list[tuple[Any, Sequence[Any]]] = [(OF_PROMPT, list(number)), (OF_RESPONSE, scored)]
    for table, items in tables:
        for name, (dtype, numbers) in table.items():
            parts = [np.array(numbers(item), dtype) for item in items]
            if any(map(len, parts)) or (name in ALWAYS and not (is_given and name == "logprobs")):
                arrays[name] = np.concatenate(parts)
                arrays[f"{name}_lengths"] = np.array(list(map(len, parts)), np.int64)
    if "inserted_at" in arrays:
        inserted = [np.array(ids, np.int32) for r in rollouts for _, ids in r.inserted]
        arrays["inserted_tokens"] = np.concatenate(inserted)
    if "routes" in arrays:
        widths = {r.routes.shape[1] for r in rollouts if r.routes is not None}
        assert len(widths) == 1, f"routes of models with {sorted(widths)} experts per token"
        arrays["routes_per_token"] = np.array([*widths], np.int64)
    return arrays


def unpack(arrays: Mapping[str, np.ndarray]) -> list[ScoredRollout]:
    """Undo pack."""
    parts: dict[str, list[np.ndarray]] = {}
    for table, one in ((OF_PROMPT, "prompt_index"), (OF_RESPONSE, "position")):
        for name, (dtype, _) in table.items():
            parts[name] = [np.empty(0, dtype)] * len(arrays[one])
            if name in arrays:
                parts[name] = np.split(arrays[name], arrays[f"{name}_lengths"].cumsum()[:-1])

    def texts(name: str) -> list[str]:
        return [_to_text(part) for part in parts[name]]

    def packed(typecode: str, of_responses: Sequence[np.ndarray]) -> list[array[Any]]:
        return [array(typecode, part.tobytes()) for part in of_responses]

    def pairs(name: str) -> list[list[Any]]:
        return [part.reshape(-1, 2).tolist() for part in parts[name]]

    of_prompts = map(
        Prompt,
        arrays["prompt_index"].tolist(),
        texts("prompt_text"),
        [tuple(part.tolist()) for part in parts["prompt_tokens"]],
        texts("answer"),
        [{"verifier": name} if name else {} for name in texts("verifier")],
        [name or None for name in texts("source")],
        [tuple(part.tolist()) or None for part in parts["critic_prompt_tokens"]],
    )
    prompts, columns = list(of_prompts), [dict[str, Any]() for _ in arrays["position"]]
    for name in SAMPLED:
        if (numbers := arrays.get(f"column_{name}")) is not None:
            of_responses = np.split(numbers, arrays["tokens_lengths"].cumsum()[:-1])
            for own, part in zip(columns, packed(numbers.dtype.char, of_responses)):
                own[name] = part
    # One flat array of all tokens.
    inserted = iter(arrays.get("inserted_tokens", np.empty(0, np.int32)).tolist())
    rollouts = map(
        Rollout,
        [prompts[number] for number in arrays["prompt"].tolist()],
        arrays["sample"].tolist(),
        arrays["position"].tolist(),
        packed("i", parts["tokens"]),
        packed("f", parts["logprobs"]) if "logprobs" in arrays else itertools.repeat(None),
        arrays["truncated"].tolist(),
        arrays["policy_version"].tolist(),
        [tuple(map(tuple, some)) for some in pairs("segments")],
        [
            tuple((at, array("i", itertools.islice(inserted, count))) for at, count in some)
            for some in pairs("inserted_at")
        ],
        columns,
        [tuple(Turn(int(end), reward) for end, reward in some) for some in pairs("turns")],
        map(_to_episode, parts["episode"]),
        _to_routes(parts["routes"], arrays.get("routes_per_token")),
    )

    verdicts = zip(
        rollouts,
        texts("text"),
        [STATUSES[number] for number in arrays["status"].tolist()],
        arrays["reward"].tolist(),
        [json.loads(found or "{}") for found in texts("metrics")],
        [tuple((int(token), reward) for token, reward in some) for some in pairs("token_rewards")],
        strict=True,
    )
    return [
        ScoredRollout(rollout, text, status, reward, metrics=metrics, token_rewards=earned)
        for rollout, text, status, reward, metrics, earned in verdicts
    ]

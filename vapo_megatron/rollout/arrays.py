"""Scored rollouts as arrays: what dump.py writes into its files.

What no response has is left out, so that an ordinary dump has no arrays for it.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vapo_megatron.data.columns import SAMPLED
from vapo_megatron.data.rollout import STATUSES, Prompt, Rollout, ScoredRollout


def pack(scored: Sequence[ScoredRollout]) -> dict[str, np.ndarray]:
    """Return arrays with one entry per prompt or response, and concatenated ones with lengths."""
    rollouts = [item.rollout for item in scored]
    number: dict[Prompt, int] = {}
    prompt = [number.setdefault(r.prompt, len(number)) for r in rollouts]
    return {
        "prompt_index": np.array([p.index for p in number], np.int64),
        **_joined("prompt_tokens", (np.array(p.token_ids, np.int32) for p in number)),
        **_joined("prompt_text", (_to_bytes(p.text) for p in number)),
        **_joined("answer", (_to_bytes(p.answer) for p in number)),
        **_critic_prompts([p.critic_token_ids for p in number]),
        **_names("verifier", [p.problem.verifier for p in number]),
        **_names("source", [p.source for p in number]),
        "prompt": np.array(prompt, np.int32),
        "sample": np.array([r.sample for r in rollouts], np.int32),
        "position": np.array([r.position for r in rollouts], np.int32),
        "policy_version": np.array([r.policy_version for r in rollouts], np.int32),
        "truncated": np.array([r.truncated for r in rollouts], np.bool_),
        "status": np.array([STATUSES.index(item.status) for item in scored], np.uint8),
        "reward": np.array([item.reward for item in scored], np.float64),
        **_joined("tokens", (np.array(r.token_ids, np.int32) for r in rollouts)),
        **_joined("logprobs", (np.array(r.logprobs, np.float32) for r in rollouts)),
        **_joined("text", (_to_bytes(item.text) for item in scored)),
        **_segments(rollouts),
        **_inserted(rollouts),
        **_token_rewards(scored),
        **_columns(rollouts),
        **_names("metrics", [item.metrics and json.dumps(item.metrics) for item in scored]),
    }


def _segments(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Nothing where one version sampled each response; else version, tokens, version, ..."""
    if not any(r.segments for r in rollouts):
        return {}
    return _joined("segments", (np.array(r.segments, np.int32).ravel() for r in rollouts))


def _inserted(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Nothing where others inserted nothing; else before which token, how many, and the tokens."""
    if not any(r.inserted for r in rollouts):
        return {}
    parts = [[(before, len(ids)) for before, ids in r.inserted] for r in rollouts]
    return {
        **_joined("inserted_at", (np.array(part, np.int32).ravel() for part in parts)),
        "inserted_tokens": np.concatenate(
            [np.array(ids, np.int32) for r in rollouts for _, ids in r.inserted]
        ),
    }


def _token_rewards(scored: Sequence[ScoredRollout]) -> dict[str, np.ndarray]:
    """Nothing where none was earned on the way; else token, reward, token, ..."""
    if not any(item.token_rewards for item in scored):
        return {}
    parts = (np.array(item.token_rewards, np.float64).ravel() for item in scored)
    return _joined("token_rewards", parts)


def _columns(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """Return the other numbers per token, which all or none of a rank's responses have."""
    names = rollouts[0].columns
    return {
        f"column_{n}": np.concatenate([np.array(r.columns[n]) for r in rollouts]) for n in names
    }


def _critic_prompts(prompts: Sequence[tuple[int, ...] | None]) -> dict[str, np.ndarray]:
    """Nothing where no prompt has one for the critic; no tokens stand for none."""
    if all(ids is None for ids in prompts):
        return {}
    return _joined("critic_prompt_tokens", (np.array(ids or (), np.int32) for ids in prompts))


def _names(name: str, names: Sequence[Any]) -> dict[str, np.ndarray]:
    """Nothing where none has a text, as in most runs; an empty text stands for none."""
    if not any(names):
        return {}
    return _joined(name, (_to_bytes(each or "") for each in names))


def _joined(name: str, parts: Iterator[np.ndarray]) -> dict[str, np.ndarray]:
    arrays = list(parts)
    lengths = np.array([len(a) for a in arrays], np.int64)
    return {name: np.concatenate(arrays), f"{name}_lengths": lengths}


def _to_bytes(text: str) -> np.ndarray:
    """Encode as UTF-8; a lone surrogate, which JSON allows, survives the round trip."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def unpack(arrays: Mapping[str, np.ndarray]) -> list[ScoredRollout]:
    """Undo pack."""

    def parts(name: str) -> list[np.ndarray]:
        return np.split(arrays[name], arrays[f"{name}_lengths"].cumsum()[:-1])

    def packed(name: str, typecode: str) -> list[array[Any]]:
        return [array(typecode, part.tobytes()) for part in parts(name)]

    def texts(name: str) -> list[str]:
        return [part.tobytes().decode("utf-8", "surrogatepass") for part in parts(name)]

    def names(name: str, beside: str = "prompt_index") -> list[str | None]:
        if name not in arrays:
            return [None] * len(arrays[beside])
        return [found or None for found in texts(name)]

    of_critic: list[tuple[int, ...] | None] = [None] * len(arrays["prompt_index"])
    if "critic_prompt_tokens" in arrays:
        of_critic = [tuple(part.tolist()) or None for part in parts("critic_prompt_tokens")]
    segments: list[tuple[tuple[int, int], ...]] = [()] * len(arrays["position"])
    if "segments" in arrays:
        segments = [tuple(map(tuple, part.reshape(-1, 2).tolist())) for part in parts("segments")]
    prompts = list(
        map(
            Prompt,
            arrays["prompt_index"].tolist(),
            texts("prompt_text"),
            [tuple(part.tolist()) for part in parts("prompt_tokens")],
            texts("answer"),
            [{} if name is None else {"verifier": name} for name in names("verifier")],
            names("source"),
            of_critic,
        )
    )
    bounds = arrays["tokens_lengths"].cumsum()[:-1]
    columns = [dict[str, Any]() for _ in arrays["position"]]
    for name in SAMPLED:
        if f"column_{name}" in arrays:
            for own, part in zip(columns, np.split(arrays[f"column_{name}"], bounds)):
                own[name] = array(part.dtype.char, part.tobytes())
    rollouts = map(
        Rollout,
        [prompts[number] for number in arrays["prompt"].tolist()],
        arrays["sample"].tolist(),
        arrays["position"].tolist(),
        packed("tokens", "i"),
        packed("logprobs", "f"),
        arrays["truncated"].tolist(),
        arrays["policy_version"].tolist(),
        segments,
        _read_inserted(arrays, parts),
        columns,
    )
    statuses = [STATUSES[number] for number in arrays["status"].tolist()]
    rewards = arrays["reward"].tolist()
    metrics = [{} if found is None else json.loads(found) for found in names("metrics", "position")]
    earned: list[tuple[tuple[int, float], ...]] = [()] * len(rewards)
    if "token_rewards" in arrays:
        pairs = (part.reshape(-1, 2).tolist() for part in parts("token_rewards"))
        earned = [tuple((int(token), reward) for token, reward in part) for part in pairs]
    scored = zip(rollouts, texts("text"), statuses, rewards, metrics, earned, strict=True)
    return [
        ScoredRollout(rollout, text, status, reward, metrics=numbers, token_rewards=on_the_way)
        for rollout, text, status, reward, numbers, on_the_way in scored
    ]


def _read_inserted(
    arrays: Mapping[str, np.ndarray], parts: Callable[[str], list[np.ndarray]]
) -> list[tuple[tuple[int, array[int]], ...]]:
    """Undo _inserted."""
    if "inserted_at" not in arrays:
        return [()] * len(arrays["position"])
    tokens, found = iter(arrays["inserted_tokens"].tolist()), []
    for part in parts("inserted_at"):
        pairs = part.reshape(-1, 2).tolist()
        found.append(tuple((at, array("i", itertools.islice(tokens, n))) for at, n in pairs))
    return found

"""Records of the few responses in rollouts/, with values, advantages and entropy of each token.

Each data-parallel rank has these for the responses it trains on. One all-reduce per step, of at
most 3 * 1024 numbers per response, shares those of the recorded responses with every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vapo_megatron.data.batch import RolloutBatch, StepSummary
from vapo_megatron.data.rollout import ScoredRollout
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.reduce import sum_over_data_parallel
from vapo_megatron.rollout.source import Decode
from vapo_megatron.rollout.turn_records import turn_records

_HALF = 512
"""Tokens kept at either end of a response that is longer than twice this."""

_DIGITS = 3

_PENDING = "\ufffd"
"""A decoder's output for bytes that are not a complete character."""


def kept(length: int) -> list[int]:
    """Return the indices of the tokens kept of a response of this length, in order."""
    if length <= 2 * _HALF:
        return list(range(length))
    return [*range(_HALF), *range(length - _HALF, length)]


def gather_token_data(
    batch: RolloutBatch,
    entropy: Tensor | None,
    positions: Sequence[int],
    summary: StepSummary,
    ranks: Ranks,
) -> dict[int, dict[str, list[float | None]]]:
    """Gather the per-token data of some responses on every rank. Collective.

    Args:
        batch: this data-parallel rank's.
        entropy: float32 [T], nats; None: not computed.
        positions: of the responses, the same on every rank.
        summary: of all ranks' responses.
        ranks: this rank's place.

    Returns:
        By position, of its kept tokens: `values`, `advantages` and `entropy`, those that the step
        has; None stands for a non-finite number.
    """
    known = {"values": batch.values, "advantages": batch.advantages, "entropy": entropy}
    held = {name: numbers for name, numbers in known.items() if numbers is not None}
    if not held:
        return {position: {} for position in positions}
    tokens = [kept(int(summary.response_lengths[p])) for p in positions]
    sizes = list(map(len, tokens))
    starts = dict(zip(batch.positions.tolist(), batch.cu_seqlens.tolist()))
    out = torch.zeros(len(held), sum(sizes))
    for position, index, part in zip(positions, tokens, out.split(sizes, dim=1)):
        if position in starts:
            at = torch.tensor(index, dtype=torch.long) + starts[position]
            for row, numbers in zip(part, held.values()):
                row.copy_(numbers[at])
    out = sum_over_data_parallel(out, ranks)
    return {
        position: dict(zip(held, map(_rounded, part)))
        for position, part in zip(positions, out.split(sizes, dim=1))
    }


def _rounded(numbers: Tensor) -> list[float | None]:
    finite = numbers.isfinite().tolist()
    return [
        round(n, _DIGITS) + 0.0 if ok else None for n, ok in zip(numbers.double().tolist(), finite)
    ]


def token_pieces(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each kept token; joined they are the response, unless some are left out.

    A character of several tokens is put at its last one.

    Args:
        token_ids: the whole response.
        decode: ids to text, with special tokens.
    """
    pieces: list[str] = []
    before: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    for at in kept(len(token_ids)):
        pending += (token_ids[at],)
        text = decode(before + pending).removeprefix(decode(before))
        # No character has more than four bytes, and a token at least one.
        unfinished = text.endswith(_PENDING) and len(pending) < 4
        if unfinished and len(pieces) + 1 < min(len(token_ids), 2 * _HALF):
            pieces.append("")
        else:
            pieces.append(text)
            # Some tokenizers write a space between two tokens and none before the first.
            before, pending = pending, ()
    return pieces


def group_records(
    recorded: Sequence[ScoredRollout],
    tokens: Mapping[int, Mapping[str, Any]],
    decode: Decode | None,
) -> list[dict[str, Any]]:
    """Return responses as lines of rollouts/step_*.jsonl, one group each.

    Args:
        recorded: responses of whole groups, by position.
        tokens: from gather_token_data.
        decode: as in token_pieces; None: no per-token data in the records.
    """
    records = []
    for _, members in itertools.groupby(recorded, lambda s: s.rollout.first):
        group = list(members)
        first = group[0].rollout
        record = {
            "prompt_index": first.prompt.index,
            "prompt": first.prompt.text,
            "answer": first.prompt.answer,
            **({"verifier": name} if (name := first.prompt.problem.verifier) else {}),
            **({"source": first.prompt.source} if first.prompt.source else {}),
            "policy_version": first.policy_version,
            "responses": [_response(s, tokens, decode) for s in group],
        }
        records.append(record)
    return records


def _response(
    scored: ScoredRollout, tokens: Mapping[int, Mapping[str, Any]], decode: Decode | None
) -> dict[str, Any]:
    rollout = scored.rollout
    record = {
        "sample": rollout.sample,
        "status": scored.status,
        "reward": float(scored.total_reward),
        **({} if scored.score is None else {"score": float(scored.score)}),
        **({"note": scored.note} if scored.note else {}),
        **({"metrics": dict(scored.metrics)} if scored.metrics else {}),
        "num_tokens": len(rollout.token_ids),
        "truncated": rollout.truncated,
        # [version, tokens]: the group's is that of its first response's last token.
        **({"versions": [list(s) for s in rollout.segments]} if rollout.segments else {}),
        "text": scored.text,
    }
    if rollout.episode is not None and rollout.episode.cut:
        record["cut_by"] = rollout.episode.cut
    if rollout.turns and decode is not None:
        record |= {
            "begin": decode(rollout.prompt.token_ids),
            "turns": turn_records(rollout, decode),
        }
    if decode is not None:
        pieces = token_pieces(rollout.token_ids, decode)
        record["tokens"] = {"pieces": pieces, **tokens[rollout.position]}
    return record

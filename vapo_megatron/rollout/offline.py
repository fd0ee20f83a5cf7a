"""Revises responses that were sampled earlier: prefixes go in, judged endings come out.

The endings that Retro-Search (rollout/revision.py) asks for are requests like any others: a
response that has tokens already, those of its prefix, goes on. What comes out for each problem is
as an evaluation has it.
"""

from __future__ import annotations

import collections
import dataclasses
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vapo_megatron.config import EvaluationConfig, RolloutConfig
from vapo_megatron.data.rollout import Prompt, Rollout
from vapo_megatron.reward.verifier import RunningVerifier
from vapo_megatron.rollout.evaluation.judging import JudgedProblems, sampling_settings
from vapo_megatron.rollout.evaluation.votes import Response
from vapo_megatron.rollout.requests import (
    Request,
    SamplingSettings,
    Waiting,
    Work,
    assign,
    request_seed,
)
from vapo_megatron.rollout.revision import (
    Decision,
    Ending,
    Revision,
    Settings,
    Trace,
    banned_first_tokens,
)

if TYPE_CHECKING:
    from vapo_megatron.rollout.vllm.engine import RolloutEngine


class Sampled(NamedTuple):
    """A response of an earlier file."""

    token_ids: Sequence[int]
    """With its stop token."""
    status: str | None
    truncated: bool
    sample: int
    place: str
    """Names it in messages."""


@dataclasses.dataclass(frozen=True)
class Reviser:
    """Revises the responses to some problems; called in place of judge_problems."""

    traces: Mapping[int, Sequence[Sampled]]
    """By Prompt.index."""
    settings: Settings
    endings: int
    """Sampled at each switch."""
    banned: tuple[int, ...]
    """Tokens that an ending does not begin with; see banned_first_tokens."""

    def __call__(
        self,
        engine: RolloutEngine,
        verifier: RunningVerifier | None,
        problems: Sequence[Prompt],
        evaluation: EvaluationConfig,
        rollout: RolloutConfig,
        *,
        decode: Callable[[Sequence[Sequence[int]]], list[str]],
        policy_version: int,
        on_progress: Callable[[int, int], None] | None = None,
        problems_per_batch: int | None = None,
        **_: Any,
    ) -> Iterator[JudgedProblems]:
        """Yield per batch this replica's problems with their revised responses; see judge_problems.

        An ending depends on the problem, the response and how many switches were tried before: not
        on the number of replicas or on other problems.
        """
        sampling = sampling_settings(evaluation, rollout.max_response_tokens)
        mine = [problems[i] for i in assign(len(problems), engine.num_replicas)[engine.replica]]
        if problems_per_batch is None:
            most = max(map(len, self.traces.values()), default=1) * self.endings
            size = max(1, 2 * rollout.max_num_sequences // most)
        else:
            size = -(-problems_per_batch // engine.num_replicas)

        def judge(prompts: Sequence[Prompt], texts: Sequence[Sequence[int]]) -> list[str]:
            found: list[str] = []
            if verifier is not None:
                asked = [prompt.problem for prompt in prompts]
                found = [verdict.status for verdict in verifier.score(decode(texts), asked)]
            # Only the replica's first rank has verdicts, and all must go on alike.
            return engine.told(found)

        for start in range(0, len(mine), size):
            part = mine[start : start + size]
            owners = [(prompt, own) for prompt in part for own in self.traces[prompt.index]]
            statuses = judge([prompt for prompt, _ in owners], [own.token_ids for _, own in owners])
            traces = [
                Trace(own.token_ids, own.place, own.status, status, own.truncated)
                for (_, own), status in zip(owners, statuses, strict=True)
            ]
            revision = Revision(traces, lambda ids: decode([ids])[0], self.settings)
            tried = collections.Counter[int]()
            while asked := revision.ask():
                requests = list[Request]()
                for trace, prefix in asked:
                    prompt, own = owners[trace]
                    for i in range(self.endings):
                        number, tries = own.sample * self.endings + i, 1 + tried[trace]
                        seed = request_seed(
                            engine.seed, 0, "evaluation", prompt.index, number, tries
                        )
                        requests.append(Request(_begun(prompt, len(requests), prefix), seed))
                    tried[trace] += 1
                whole = _finished(engine, requests, self.banned, sampling, policy_version)
                found = judge([r.prompt for r in whole], [r.token_ids for r in whole])
                endings = [
                    Ending(r.token_ids[len(of.rollout.token_ids) :], status, r.truncated)
                    for r, of, status in zip(whole, requests, found, strict=True)
                ]
                k = self.endings
                revision.decide([endings[i : i + k] for i in range(0, len(endings), k)])
            if on_progress is not None:
                on_progress(start + len(part), len(mine))
            yield _judged(owners, traces, revision, decode) if verifier is not None else []


def _begun(prompt: Prompt, position: int, prefix: Sequence[int]) -> Rollout:
    """Return a response that has a prefix; nobody asks for its log-probabilities."""
    empty = Rollout.empty(prompt, 0, position, 0)
    return dataclasses.replace(
        empty, token_ids=array("i", prefix), logprobs=array("f", bytes(4 * len(prefix)))
    )


def _finished(
    engine: RolloutEngine,
    requests: Sequence[Request],
    banned: tuple[int, ...],
    sampling: SamplingSettings,
    policy_version: int,
) -> list[Rollout]:
    """Let responses go on to their ends, whose first token is none of the banned ones."""
    parts, later = iter([[r._replace(max_tokens=1, banned=banned) for r in requests]]), []
    begun, ended = set[int](), dict[int, Rollout]()

    def end(rollout: Rollout) -> None:
        position = rollout.position
        has_room = len(rollout.token_ids) < sampling.max_response_tokens
        if position not in begun and rollout.truncated and has_room:
            rest = dataclasses.replace(rollout, truncated=False)
            later.append(Request(rest, requests[position].seed))
        else:
            ended[position] = rollout
        begun.add(position)

    def go_on(is_idle: bool) -> list[Request]:
        found = list(later)
        later.clear()
        return found

    work = Work(
        lambda room: next(parts, []), end, len(requests),
        waiting=Waiting(lambda: len(later), go_on),
    )  # fmt: skip
    engine.run(work, sampling, policy_version)
    return [ended[position] for position in range(len(requests))]


def _judged(
    owners: Sequence[tuple[Prompt, Sampled]],
    traces: Sequence[Trace],
    revision: Revision,
    decode: Callable[[Sequence[Sequence[int]]], list[str]],
) -> JudgedProblems:
    """Return the problems with their responses as they are now, and what was decided."""
    log = dict[int, list[dict[str, Any]]]()
    for decision in revision.log:
        log.setdefault(decision.trace, []).append(_entry(decision))
    now, found = revision.revised(), dict[int, tuple[Prompt, list[Response]]]()
    for index, ((prompt, own), trace) in enumerate(zip(owners, traces, strict=True)):
        token_ids = list(now.get(index, own.token_ids))
        left_out = revision.left_out.get(index)
        response: Response = {
            "sample": own.sample,
            "status": trace.status,
            "score": None,
            "answer": None,
            "vote": None,
            "num_tokens": len(token_ids),
            "num_tokens_before": len(own.token_ids),
            "truncated": own.truncated,
            "text": decode([token_ids])[0],
            "token_ids": token_ids,
            "decisions": log.get(index, []),
            **({} if left_out is None else {"left_out": left_out}),
        }
        found.setdefault(prompt.index, (prompt, []))[1].append(response)
    return list(found.values())


def _entry(decision: Decision) -> dict[str, Any]:
    return {name: value for name, value in decision._asdict().items() if name != "trace"}


def banned_tokens(tokenizer: Any, vocab_size: int, settings: Settings) -> tuple[int, ...]:
    """Return the ids that begin a switch by themselves.

    Args:
        tokenizer: transformers'.
        vocab_size: of the model, whose ids beyond the tokenizer's have no text.
        settings: of the revision.
    """
    texts = tokenizer.batch_decode([[i] for i in range(min(len(tokenizer), vocab_size))])
    return tuple(banned_first_tokens(texts, settings.keywords))

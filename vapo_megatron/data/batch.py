"""The data that moves between generation, scoring, the critic and the actor, and the shape legend.

Shape legend, used by every docstring of the package:
    B  responses           (of this data-parallel rank, mini-batch or microbatch, as the text says)
    T  response tokens     of the same B responses, concatenated
    S  prompt + response tokens of the same B responses, packed as the model sees them
    S', T'  those of S and T that this context-parallel rank computes
    P  prompts of a step   G  samples of one prompt (group size)
    V  vocabulary          H  hidden size
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vapo_megatron.data.problems import Problem


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One problem of a data set."""

    index: int
    """Row in the data set: identifies the problem over the whole run, and seeds its sampling."""
    text: str
    token_ids: tuple[int, ...]
    answer: str
    """Ground truth, as the verifier reads it."""
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """The row's other columns."""
    source: str | None = None
    """See Problem."""
    critic_token_ids: tuple[int, ...] | None = None
    """What the critic is given in place of token_ids; None: those."""

    @property
    def problem(self) -> Problem:
        """What the verifier is given."""
        return Problem(self.text, self.answer, self.metadata, self.source)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """One sampled response."""

    prompt: Prompt
    sample: int
    """Sample index within the prompt's group, 0..G-1."""
    position: int
    """Position in the step's repeated prompt list, 0..P*G-1: the same in every layout."""
    token_ids: array[int]
    """int32, typecode "i": the response, its stop token included."""
    logprobs: array[float]
    """float32, typecode "f", per response token: log-probability under the distribution that was
    sampled from."""
    truncated: bool
    """True when a length limit ended the response, so that it has no stop token."""
    policy_version: int
    """Number of weight publications that the sampler had seen, at the last token."""
    segments: tuple[tuple[int, int], ...] = ()
    """(version, number of tokens) one after the other, where several versions sampled it."""

    @classmethod
    def begun(cls, prompt: Prompt, sample: int, position: int, version: int) -> Rollout:
        """Return a response that has no tokens yet."""
        return cls(prompt, sample, position, array("i"), array("f"), False, version)

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """As segments, of any response."""
        return self.segments or ((self.policy_version, len(self.token_ids)),)

    def extended(
        self, token_ids: array[int], logprobs: array[float], version: int, *, truncated: bool
    ) -> Rollout:
        """Return it with the tokens that a version has sampled after it."""
        parts = [part for part in self.versions if part[1]]
        if token_ids:
            before = parts.pop()[1] if parts and parts[-1][0] == version else 0
            parts.append((version, before + len(token_ids)))
        return dataclasses.replace(
            self,
            token_ids=self.token_ids + token_ids,
            logprobs=self.logprobs + logprobs,
            truncated=truncated,
            policy_version=parts[-1][0] if parts else version,
            segments=tuple(parts) if len(parts) > 1 else (),
        )


STATUSES = ("correct", "wrong", "unparsable", "timed_out", "failed")
"""The verifier's possible verdicts; dumps store their index."""
PENDING = "pending"
"""Status of a response that the reward model is still to score."""


@dataclasses.dataclass(frozen=True)
class ScoredRollout:
    """A response, the verifier's verdict on it and its shaped reward."""

    rollout: Rollout
    text: str
    """Of the response, without special tokens: what was judged."""
    status: str
    """One of STATUSES, or PENDING."""
    reward: float
    """NaN while the verdict is pending."""
    score: float | None = None
    """The verdict's own, before shaping."""
    note: str = ""
    """The verifier's explanation."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    """The verdict's own numbers."""

    @property
    def is_correct(self) -> bool:
        """The verdict, independent of the reward."""
        return self.status == "correct"


@dataclasses.dataclass(frozen=True)
class StepSummary:
    """Lengths, verdict and reward of all of a step's responses, on every rank, by position.

    All arrays are [P*G].
    """

    prompt_lengths: Tensor
    """int64, tokens"""
    response_lengths: Tensor
    """int64, tokens"""
    statuses: Tensor
    """int64, index into STATUSES; their number where the verdict is pending"""
    truncated: Tensor
    """bool"""
    rewards: Tensor
    """float32"""
    prompt_indices: Tensor
    """int64, Prompt.index"""
    sources: Tensor
    """int64, the rank that sampled it and has its text"""
    critic_prompt_lengths: Tensor | None = None
    """int64, tokens; None: the critic is given the same prompts"""
    scores: Tensor | None = None
    """float32, the verdicts' own, NaN where there is none; None: no verdict has one"""

    @property
    def is_correct(self) -> Tensor:
        """bool: the verifier's verdict, untouched by reward shaping."""
        return self.statuses == STATUSES.index("correct")

    @property
    def is_pending(self) -> Tensor:
        """bool: the reward model is still to score it."""
        return self.statuses == len(STATUSES)

    @property
    def sequence_lengths(self) -> list[int]:
        """Prompt + response, in tokens; of two prompts the longer one, because both are packed."""
        prompts = self.prompt_lengths
        if self.critic_prompt_lengths is not None:
            prompts = prompts.maximum(self.critic_prompt_lengths)
        return (prompts + self.response_lengths).tolist()


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """Responses of one data-parallel rank, concatenated; the same on its model-parallel ranks.

    Fields that are not computed yet are None; `replace` sets them.
    """

    tokens: Tensor
    """int64 [S]: prompt, response, prompt, response, ..."""
    sequence_cu_seqlens: Tensor
    """int32 [B+1]: bounds of prompt + response in S."""
    cu_seqlens: Tensor
    """int32 [B+1]: bounds of the responses in T."""
    positions: Tensor
    """int64 [B]: Rollout.position."""
    rewards: Tensor
    """float32 [B]: shaped reward of the whole response."""
    is_correct: Tensor
    """bool [B]: the verifier's verdict, untouched by reward shaping."""
    truncated: Tensor
    """bool [B]"""
    rollout_logprobs: Tensor
    """float32 [T]: from the sampler."""
    loss_mask: Tensor
    """bool or float32 [T]: True or a weight > 0 where a token is trained on."""
    policy_mask: Tensor | None = None
    """float32 [T]: weight of each token in the policy loss, loss_mask times the correction for the
    sampler; None: loss_mask."""
    old_logprobs: Tensor | None = None
    """float32 [T]: from the trainer, before this step's updates."""
    reference_logprobs: Tensor | None = None
    """float32 [T]: from the frozen reference policy."""
    values: Tensor | None = None
    """float32 [T]: V of the state before each response token is emitted."""
    advantages: Tensor | None = None
    """float32 [T]"""
    returns: Tensor | None = None
    """float32 [T]: regression targets of the critic."""
    critic_prompts: Tensor | None = None
    """int64: the prompts that the critic is given, one after the other; None: those in tokens."""
    critic_prompt_lengths: Tensor | None = None
    """int64 [B], tokens."""

    @property
    def num_responses(self) -> int:
        """B."""
        return self.cu_seqlens.numel() - 1

    @property
    def response_lengths(self) -> Tensor:
        """int64 [B], in tokens."""
        return self.cu_seqlens.diff().long()

    @property
    def sequence_lengths(self) -> Tensor:
        """int64 [B], prompt + response, in tokens."""
        return self.sequence_cu_seqlens.diff().long()

    @property
    def policy_weights(self) -> Tensor:
        """[T]: weights of the policy loss, of the entropy bonus and of the KL to the reference."""
        return self.loss_mask if self.policy_mask is None else self.policy_mask

    @property
    def is_finite(self) -> bool:
        """Whether all per-token fields are finite: log-probabilities, values, advantages."""
        known = (getattr(self, name) for name in _PER_TOKEN)
        return all(_all_finite(numbers) for numbers in known if numbers is not None)

    def replace(self, **fields: Tensor) -> RolloutBatch:
        """Return the same batch with some fields set."""
        return dataclasses.replace(self, **fields)

    def for_critic(self) -> RolloutBatch:
        """Return the same responses behind the prompts that the critic is given.

        All [T] are the same; only S differs.
        """
        prompts, lengths, responses = (
            self.critic_prompts, self.critic_prompt_lengths, self.response_lengths
        )  # fmt: skip
        assert prompts is not None and lengths is not None, "the critic has no prompts of its own"
        is_prompt = _is_prompt(lengths, responses)
        tokens = self.tokens.new_empty(len(is_prompt))
        tokens[is_prompt] = prompts
        old = _is_prompt(self.sequence_lengths - responses, responses)
        tokens[~is_prompt] = self.tokens[~old]
        return dataclasses.replace(
            self,
            tokens=tokens,
            sequence_cu_seqlens=bounds(lengths + responses),
            critic_prompts=None,
            critic_prompt_lengths=None,
        )

    def narrow(self, first: int, count: int) -> RolloutBatch:
        """Return the batch of consecutive responses; its tensors are views of this one's.

        The critic's prompts, which for_critic has used by then, are left out.
        """
        end = first + count
        bounds, sequence_bounds = self.cu_seqlens, self.sequence_cu_seqlens
        in_t = slice(int(bounds[first]), int(bounds[end]))
        in_s = slice(int(sequence_bounds[first]), int(sequence_bounds[end]))
        picked = {name: getattr(self, name)[first:end] for name in _PER_RESPONSE}
        known = (name for name in _PER_TOKEN if getattr(self, name) is not None)
        return RolloutBatch(
            tokens=self.tokens[in_s],
            sequence_cu_seqlens=sequence_bounds[first : end + 1] - sequence_bounds[first],
            cu_seqlens=bounds[first : end + 1] - bounds[first],
            **picked,
            **{name: getattr(self, name)[in_t] for name in known},
        )

    def picked(self, chosen: Tensor) -> RolloutBatch:
        """Return the batch of the responses where chosen, bool [B], holds; a copy. As narrow."""
        in_s = chosen.repeat_interleave(self.sequence_lengths)
        in_t = self.per_token(chosen)
        known = (name for name in _PER_TOKEN if getattr(self, name) is not None)
        return RolloutBatch(
            tokens=self.tokens[in_s],
            sequence_cu_seqlens=bounds(self.sequence_lengths[chosen]),
            cu_seqlens=bounds(self.response_lengths[chosen]),
            **{name: getattr(self, name)[chosen] for name in _PER_RESPONSE},
            **{name: getattr(self, name)[in_t] for name in known},
        )

    def per_token(self, per_response: Tensor) -> Tensor:
        """Spread [B] over the tokens of each response -> [T]."""
        return per_response.repeat_interleave(
            self.response_lengths, output_size=self.rollout_logprobs.numel()
        )


def bounds(lengths: Tensor) -> Tensor:
    """Return int32 [B+1]: where sequences of these lengths begin, and the last one ends."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


def _is_prompt(prompts: Tensor, responses: Tensor) -> Tensor:
    """bool [S], from lengths [B] each."""
    lengths = torch.stack([prompts, responses], 1).flatten()
    return torch.tensor([True, False]).repeat(len(prompts)).repeat_interleave(lengths)


def _all_finite(numbers: Tensor) -> bool:
    """isfinite().all() in one pass without temporary tensors: NaN is both minimum and maximum."""
    if numbers.dtype == torch.bool or numbers.numel() == 0:
        return True
    return bool(torch.stack(numbers.aminmax()).isfinite().all())


_PER_RESPONSE = ("positions", "rewards", "is_correct", "truncated")
_PER_TOKEN = (
    "rollout_logprobs", "loss_mask", "policy_mask", "old_logprobs", "reference_logprobs", "values",
    "advantages", "returns",
)  # fmt: skip

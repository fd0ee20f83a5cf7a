"""The data that moves between generation, scoring, the critic and the actor, and the shape legend.

Shape legend, used by every docstring of the package:
    B  responses           (of this data-parallel rank, mini-batch or microbatch, as the text says)
    T  response tokens     of the same B responses, concatenated: what the policy sampled
    S  all tokens          of the same B responses, packed as the model sees them: prompt, response
                           tokens, and what others inserted between these
    S', T'  those of S and T that this context-parallel rank computes
    P  prompts of a step   G  samples of one prompt (group size)   N  responses of a step
    V  vocabulary          H  hidden size
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vapo_megatron.data.columns import PER_RESPONSE, PER_TOKEN, SAMPLED
from vapo_megatron.data.rollout import CUTS, PENDING, STATUSES, Episode, ScoredRollout


def _gathered(
    dtype: torch.dtype, read: Callable[[ScoredRollout], float], missing: float | None = None
) -> Any:
    """Declare a field of StepSummary: its dtype, and how it is read from a response.

    missing: what stands for none; the field is None where no response has any.
    """
    about = {"dtype": dtype, "read": read, "missing": missing}
    if missing is None:
        return dataclasses.field(metadata=about)
    return dataclasses.field(metadata=about, default=None)


def _known() -> Any:
    """Declare a field of StepSummary that no response says itself."""
    return dataclasses.field()


def _critic_prompt_length(scored: ScoredRollout) -> int:
    ids = scored.rollout.prompt.critic_token_ids
    return -1 if ids is None else len(ids)


def _episode(scored: ScoredRollout) -> Episode:
    return scored.rollout.episode or Episode()


def _column_bits(scored: ScoredRollout) -> int:
    return sum(1 << list(SAMPLED).index(name) for name in scored.own_columns)


@dataclasses.dataclass(frozen=True)
class StepSummary:
    """Lengths, verdict and reward of all of a step's responses, on every rank, by position.

    All arrays are [N].
    """

    prompt_lengths: Tensor = _gathered(torch.int64, lambda s: len(s.rollout.prompt.token_ids))
    """tokens"""
    response_lengths: Tensor = _gathered(torch.int64, lambda s: len(s.rollout.token_ids))
    """tokens"""
    statuses: Tensor = _gathered(torch.int64, lambda s: (*STATUSES, PENDING).index(s.status))
    """index into STATUSES; their number where the verdict is pending"""
    truncated: Tensor = _gathered(torch.bool, lambda s: s.rollout.truncated)
    """Rollout.truncated"""
    rewards: Tensor = _gathered(torch.float32, lambda s: s.reward)
    """of the verdicts, shaped"""
    prompt_indices: Tensor = _gathered(torch.int64, lambda s: s.rollout.prompt.index)
    """Prompt.index"""
    firsts: Tensor = _gathered(torch.int64, lambda s: s.rollout.first)
    """Rollout.first: the same for all responses of a group"""
    sources: Tensor = _known()
    """int64, the rank that sampled it and has its text"""
    critic_prompt_lengths: Tensor | None = _gathered(torch.int64, _critic_prompt_length, -1)
    """tokens; None: the critic is given the same prompts"""
    scores: Tensor | None = _gathered(
        torch.float32, lambda s: math.nan if s.score is None else s.score, math.nan
    )
    """the verdicts' own, NaN where there is none; None: no verdict has one"""
    inserted_lengths: Tensor | None = _gathered(torch.int64, lambda s: s.rollout.num_inserted, 0)
    """tokens that others wrote between a response's own; None: there are none"""
    earned: Tensor | None = _gathered(torch.float32, lambda s: s.earned, 0)
    """sums of ScoredRollout.token_rewards; None: there are none"""
    turns: Tensor | None = _gathered(torch.int64, lambda s: len(s.rollout.turns), 0)
    """their number; None: no response has an environment"""
    environment_failed: Tensor | None = _gathered(torch.bool, lambda s: _episode(s).failed, 0)
    """Episode.failed; None: none has"""
    failed_calls: Tensor | None = _gathered(torch.int64, lambda s: _episode(s).failed_calls, 0)
    """Episode.failed_calls; None: there are none"""
    environment_seconds: Tensor | None = _gathered(torch.float32, lambda s: _episode(s).seconds, 0)
    """Episode.seconds; None: none took any"""
    cuts: Tensor | None = _gathered(torch.int64, lambda s: CUTS.index(_episode(s).cut), 0)
    """index of Episode.cut; None: none was cut"""
    given: Tensor | None = _gathered(torch.bool, lambda s: s.rollout.logprobs is None, 0)
    """the data gave it: nothing has sampled or judged it; None: all are sampled"""
    column_bits: Tensor | None = _gathered(torch.int64, _column_bits, 0)
    """which columns of SAMPLED it has, beside log-probabilities; None: no others"""

    @property
    def is_given(self) -> bool:
        """Whether the data gave the responses, all of them; then there are no log-probabilities."""
        assert self.given is None or self.given.all(), "a step has given or sampled responses"
        return self.given is not None

    @property
    def is_correct(self) -> Tensor:
        """bool: the verifier's verdict, untouched by reward shaping."""
        return self.statuses == STATUSES.index("correct")

    @property
    def is_pending(self) -> Tensor:
        """bool: the reward model is still to score it."""
        return self.statuses == len(STATUSES)

    @property
    def groups(self) -> Tensor:
        """int64: number of each response's group, 0..P-1, in order; groups may differ in size."""
        return self.firsts.unique(return_inverse=True)[1]

    @property
    def total_rewards(self) -> Tensor:
        """float32: of the verdict and of all that was earned on the way."""
        return self.rewards if self.earned is None else self.rewards + self.earned

    @property
    def seen_lengths(self) -> Tensor:
        """int64, tokens that the actor sees: prompt, response and inserted ones."""
        lengths = self.prompt_lengths + self.response_lengths
        return lengths if self.inserted_lengths is None else lengths + self.inserted_lengths

    @property
    def sequence_lengths(self) -> list[int]:
        """As seen_lengths; of two prompts the longer one, because both are packed."""
        lengths = self.seen_lengths
        if self.critic_prompt_lengths is not None:
            lengths = lengths + (self.critic_prompt_lengths - self.prompt_lengths).clamp(min=0)
        return lengths.tolist()

    @property
    def travelling(self) -> list[str]:
        """Names of SAMPLED that some response has: what exchange sends of every response."""
        bits = 0 if self.column_bits is None else int(_any_bits(self.column_bits))
        always = () if self.is_given else ("logprobs",)
        return [n for i, n in enumerate(SAMPLED) if n in always or bits >> i & 1]


def _any_bits(bits: Tensor) -> int:
    found = 0
    for some in bits.unique().tolist():
        found |= some
    return found


class RolloutBatch:
    """Responses of one data-parallel rank, concatenated; the same on its model-parallel ranks.

    Its columns are attributes: those of data/columns.py, where each is described. Columns that are
    not computed yet are None; `replace` sets them.
    """

    def __init__(
        self,
        tokens: Tensor,
        sequence_cu_seqlens: Tensor,
        cu_seqlens: Tensor,
        critic_prompts: Tensor | None = None,
        critic_prompt_lengths: Tensor | None = None,
        **columns: Tensor | None,
    ) -> None:
        """Put a batch together.

        Args:
            tokens: int64 [S], one sequence after the other.
            sequence_cu_seqlens: int32 [B+1], bounds of the sequences in S.
            cu_seqlens: int32 [B+1], bounds of the responses in T.
            critic_prompts: int64, the prompts that the critic is given, one after the other; None:
                those in tokens.
            critic_prompt_lengths: int64 [B], tokens.
            columns: by name. Without `places` and `prompt_lengths` each response is the end of its
                sequence.
        """
        self.tokens, self.sequence_cu_seqlens = tokens, sequence_cu_seqlens
        self.cu_seqlens = cu_seqlens
        self.critic_prompts, self.critic_prompt_lengths = critic_prompts, critic_prompt_lengths
        unknown = columns.keys() - PER_RESPONSE.keys() - PER_TOKEN.keys()
        assert not unknown, f"not in data/columns.py: {sorted(unknown)}"
        self._columns = {name: column for name, column in columns.items() if column is not None}
        if "prompt_lengths" not in self._columns:
            self._columns["prompt_lengths"] = self.sequence_lengths - self.response_lengths
        if "places" not in self._columns:
            starts = (self.prompt_lengths - cu_seqlens[:-1]).repeat_interleave(
                self.response_lengths
            )
            self._columns["places"] = (
                torch.arange(len(starts), device=starts.device) + starts
            ).int()

    def __getattr__(self, name: str) -> Any:
        if name in PER_RESPONSE or name in PER_TOKEN:
            return self._columns.get(name)
        raise AttributeError(f"a RolloutBatch has no {name}: it is not in data/columns.py")

    @property
    def num_responses(self) -> int:
        """B."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        """T, without reading from a device."""
        return int(self.places.numel())

    @property
    def response_lengths(self) -> Tensor:
        """int64 [B], in tokens."""
        return self.cu_seqlens.diff().long()

    @property
    def sequence_lengths(self) -> Tensor:
        """int64 [B], prompt, response and inserted tokens."""
        return self.sequence_cu_seqlens.diff().long()

    @property
    def policy_weights(self) -> Tensor:
        """[T]: weights of the policy loss, of the entropy bonus and of the KL to the reference."""
        mask: Tensor = self.loss_mask if self.policy_mask is None else self.policy_mask
        return mask

    @property
    def is_finite(self) -> bool:
        """Whether all per-token columns are finite: log-probabilities, values, advantages."""
        return all(all_finite(c) for name, c in self._columns.items() if name in PER_TOKEN)

    def replace(self, **changes: Tensor | None) -> RolloutBatch:
        """Return the same batch with some columns set."""
        return RolloutBatch(**{**self.tensors, **changes})  # type: ignore[arg-type]

    def each(self, change: Callable[[Tensor], Tensor]) -> RolloutBatch:
        """Return the batch with every tensor changed, to another device for example."""
        tensors = self.tensors.items()
        return RolloutBatch(**{n: t if t is None else change(t) for n, t in tensors})  # type: ignore

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """Everything that it is made of, by name; see __init__."""
        return {
            "tokens": self.tokens,
            "sequence_cu_seqlens": self.sequence_cu_seqlens,
            "cu_seqlens": self.cu_seqlens,
            "critic_prompts": self.critic_prompts,
            "critic_prompt_lengths": self.critic_prompt_lengths,
            **self._columns,
        }

    def for_critic(self) -> RolloutBatch:
        """Return the same responses behind the prompts that the critic is given.

        All [T] are the same but for places; S differs.
        """
        prompts, lengths = self.critic_prompts, self.critic_prompt_lengths
        assert prompts is not None and lengths is not None, "the critic has no prompts of its own"
        rest = self.sequence_lengths - self.prompt_lengths
        is_prompt = _is_prompt(lengths, rest)
        tokens = self.tokens.new_empty(len(is_prompt))
        tokens[is_prompt] = prompts
        tokens[~is_prompt] = self.tokens[~_is_prompt(self.prompt_lengths, rest)]
        return self.replace(
            tokens=tokens,
            sequence_cu_seqlens=bounds(lengths + rest),
            places=self.places + self.per_token(lengths - self.prompt_lengths).int(),
            prompt_lengths=lengths,
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
        return RolloutBatch(
            tokens=self.tokens[in_s],
            sequence_cu_seqlens=sequence_bounds[first : end + 1] - sequence_bounds[first],
            cu_seqlens=bounds[first : end + 1] - bounds[first],
            **self._select(slice(first, end), in_t),
        )

    def picked(self, chosen: Tensor) -> RolloutBatch:
        """Return the batch of the responses where chosen, bool [B], holds; a copy. As narrow."""
        return RolloutBatch(
            tokens=self.tokens[chosen.repeat_interleave(self.sequence_lengths)],
            sequence_cu_seqlens=bounds(self.sequence_lengths[chosen]),
            cu_seqlens=bounds(self.response_lengths[chosen]),
            **self._select(chosen, self.per_token(chosen)),
        )

    def _select(self, in_b: Any, in_t: Any) -> dict[str, Tensor]:
        """Index every column by response or by token."""
        return {
            name: column[in_b if name in PER_RESPONSE else in_t]
            for name, column in self._columns.items()
        }

    def per_token(self, per_response: Tensor) -> Tensor:
        """Spread [B] over the tokens of each response -> [T]."""
        return per_response.repeat_interleave(self.response_lengths, output_size=self.num_tokens)


def bounds(lengths: Tensor) -> Tensor:
    """Return int32 [B+1]: where sequences of these lengths begin, and the last one ends."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


def _is_prompt(prompts: Tensor, others: Tensor) -> Tensor:
    """bool [S], from lengths [B] each."""
    lengths = torch.stack([prompts, others], 1).flatten()
    return torch.tensor([True, False]).repeat(len(prompts)).repeat_interleave(lengths)


def all_finite(numbers: Tensor) -> bool:
    """Return isfinite().all(), without temporary tensors: NaN is both minimum and maximum."""
    if not numbers.is_floating_point() or numbers.numel() == 0:
        return True
    return bool(torch.stack(numbers.aminmax()).isfinite().all())

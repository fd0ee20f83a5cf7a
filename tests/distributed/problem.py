"""What every layout is asked to compute: the same responses, losses and settings.

Response lengths run from 1 (nothing after the first token) to 300, two are cut off by the length
limit, two of twenty are correct; four have several turns, between which others wrote tokens, and
rewards on the way.
Advantages, returns and old values are random, so that a token at the wrong place shows; a few
tokens are masked, and IcePop drops a fifth of them from the policy loss, among them two whole
responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.cut import batch_of
from vapo_megatron.data.batch import RolloutBatch

# (prompt, response) tokens.
LENGTHS = (
    (3, 1), (12, 300), (7, 57), (2, 1), (9, 2), (5, 121), (17, 34), (4, 212), (8, 5), (6, 91),
    (1, 17), (11, 1), (3, 45), (2, 8), (20, 72), (5, 3), (14, 150), (6, 1), (9, 26), (4, 11),
)  # fmt: skip
INSERTED = {1: ((100, 23), (200, 7)), 5: ((1, 40),), 8: ((4, 1),), 13: ((0, 3),)}
"""Response -> (before which of its tokens, how many tokens others wrote there)."""
EARNED = {(1, 99): 0.5, (1, 199): -0.25, (5, 0): 1.0, (8, 4): 0.125}
"""(response, token) -> what was earned there, beside the verdict's reward."""
CORRECT = (2, 12)
TRUNCATED = (1, 7)
MASKED = (0, 40, 41, 360, 700)
"""Tokens of T that loss_mask drops; the first is a whole response."""
VOCAB = 61
TEMPERATURE = 0.8
VALUE_CLIP = 0.3


def places(response: int) -> list[int]:
    """Where each of its tokens stands in its sequence."""
    prompt, length = LENGTHS[response]
    inserted = dict(INSERTED.get(response, ()))
    found, place = [], prompt
    for token in range(length):
        place += inserted.get(token, 0)
        found.append(place)
        place += 1
    return found


def turns(response: int) -> list[range]:
    """Its tokens, turn by turn."""
    starts = sorted({0, *(token for token, _ in INSERTED.get(response, ()))})
    return [range(a, b) for a, b in zip(starts, [*starts[1:], LENGTHS[response][1]])]


SEQUENCES = [places(i)[-1] + 1 for i in range(len(LENGTHS))]
"""Tokens of each: prompt, response and what was inserted."""


class ActorLoss(NamedTuple):
    """Fields of the algorithm's configuration; a factor on the advantages, and what is added."""

    advantage_scale: float = 0.0
    positive_lm_coef: float = 0.0
    entropy_coef: float = 0.0
    loss_aggregation: str = "token"
    sampler_correction: str = "none"
    kl_coef: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    policy_loss: str = "ppo_clip"
    dis_clip_low: float = 0.3
    dis_clip_high: float = 5.0
    dppo_max_difference: float = 0.01
    dppo_ratio_cap: float = 4.0
    advantage_shift: float = 0.0


class CriticLoss(NamedTuple):
    """Fields of the algorithm's configuration."""

    value_clip: float | None = None
    value_range: list[float] | None = None


ACTOR_LOSSES = {
    "policy": ActorLoss(advantage_scale=1.0),
    "positive NLL": ActorLoss(positive_lm_coef=1.0, policy_loss="none"),
    "entropy": ActorLoss(entropy_coef=1.0),
    # With a shift, because A log pi of either sign would cancel to a loss without digits.
    "DIS": ActorLoss(1.0, policy_loss="dis", advantage_shift=0.7),
    "DPPO, sample-level": ActorLoss(
        1.0, 0.1, 0.05, "sample", policy_loss="dppo_tv", advantage_shift=0.7
    ),
    "all": ActorLoss(1.0, 0.1, 0.05, sampler_correction="icepop", kl_coef=0.2),
    "all, sample-level": ActorLoss(1.0, 0.1, 0.05, "sample", "icepop", kl_coef=0.2),
}
CRITIC_LOSSES = {
    "value": CriticLoss(),
    "value in a range": CriticLoss(value_range=[-3.0, 2.0]),
    "clipped value": CriticLoss(value_clip=VALUE_CLIP),
}
LOSSES = {"actor": ACTOR_LOSSES, "critic": CRITIC_LOSSES}
ON_ONE_AXIS = ("DIS", "DPPO, sample-level", "value in a range")
"""Computed where one axis at most is above 1, in float32: they differ from the others in the last
stage's arithmetic of each token and nowhere else."""

GAE = {
    unit: {"gae_unit": unit, "length_adaptive_alpha": 0.6, "gamma": 0.97}
    for unit in ("token", "turn")
}
"""Fields of the algorithm's configuration; advantages are whitened, too."""

# One update with the last of the losses. With a large epsilon it shows the gradient's scale, which
# Adam would hide; the clip is active.
OPTIMIZER = {"adam_eps": 1e-2, "weight_decay": 0.1}
LEARNING_RATE, CLIP_GRAD = 3e-3, 0.5


class Problem(NamedTuple):
    tokens: Tensor
    """int64 [S]"""
    is_correct: Tensor
    """bool [B]"""
    mask: Tensor
    """bool [T]"""
    advantages: Tensor
    """float32 [T], as all that follow"""
    returns: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    """exp(old_logprobs - rollout_logprobs) of a fifth lies outside [0.5, 5]."""
    old_values: Tensor

    @property
    def reference_logprobs(self) -> Tensor:
        """float32 [T]"""
        return self.old_logprobs + 0.3 * _noise(len(self.mask), seed=3)

    @property
    def bounds(self) -> list[int]:
        """Of the responses in T."""
        return torch.tensor([0, *(n for _, n in LENGTHS)]).cumsum(0).tolist()

    @property
    def targets(self) -> Tensor:
        """int64 [T]"""
        sequences = self.tokens.split(SEQUENCES)
        return torch.cat([tokens[places(i)] for i, tokens in enumerate(sequences)])

    @property
    def earned(self) -> Tensor:
        """float32 [T]: rewards without the verdict's."""
        earned = torch.zeros(len(self.mask))
        for (response, token), reward in EARNED.items():
            earned[self.bounds[response] + token] = reward
        return earned

    @property
    def turn_starts(self) -> Tensor:
        """int32 [T]"""
        starts = torch.zeros(len(self.mask), dtype=torch.int32)
        first = [self.bounds[i] + turn[0] for i in range(len(LENGTHS)) for turn in turns(i)]
        starts[first] = 1
        return starts

    def batch(self, scale: float = 1.0, shift: float = 0.0) -> RolloutBatch:
        """All responses as the trainer holds them once advantages are known."""
        prompts, responses = torch.tensor(LENGTHS).t()
        truncated = torch.zeros(len(LENGTHS), dtype=torch.bool)
        truncated[list(TRUNCATED)] = True
        return batch_of(
            self.tokens,
            SEQUENCES,
            responses,
            prompt_lengths=prompts,
            places=torch.tensor(sum(map(places, range(len(LENGTHS))), [])).int(),
            rewards=self.is_correct * 2.0 - 1,
            is_correct=self.is_correct,
            truncated=truncated,
            token_rewards=self.earned,
            turn_starts=self.turn_starts,
            rollout_logprobs=self.rollout_logprobs,
            loss_mask=self.mask,
            old_logprobs=self.old_logprobs,
            reference_logprobs=self.reference_logprobs,
            values=self.old_values,
            advantages=self.advantages * scale + shift,
            returns=self.returns,
        )


def _noise(size: int, *, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def make_problem() -> Problem:
    """Everything but old_logprobs, rollout_logprobs and old_values, which lie near the model's own.

    See near and sampled.
    """
    generator = torch.Generator().manual_seed(11)
    size = sum(response for _, response in LENGTHS)
    mask = torch.ones(size, dtype=torch.bool)
    mask[list(MASKED)] = False
    is_correct = torch.zeros(len(LENGTHS), dtype=torch.bool)
    is_correct[list(CORRECT)] = True
    return Problem(
        tokens=torch.randint(VOCAB, (sum(SEQUENCES),), generator=generator),
        is_correct=is_correct,
        mask=mask,
        advantages=torch.randn(size, generator=generator),
        returns=torch.randn(size, generator=generator),
        old_logprobs=torch.zeros(size),
        rollout_logprobs=torch.zeros(size),
        old_values=torch.zeros(size),
    )


def with_other_observations(problem: Problem) -> Problem:
    """The same with another id for every token that is neither of a prompt nor of a response."""
    tokens = problem.tokens.clone()
    for i, sequence in enumerate(tokens.split(SEQUENCES)):
        inserted = torch.ones(len(sequence), dtype=torch.bool)
        inserted[: LENGTHS[i][0]] = False
        inserted[places(i)] = False
        sequence[inserted] = (sequence[inserted] + 7) % VOCAB
    return problem._replace(tokens=tokens)


def near(outputs: Tensor, spread: float, edges: tuple[float, ...], margin: float) -> Tensor:
    """float32 [T]: outputs plus noise, so that clips are active on some tokens on either side.

    No difference lies closer than the margin to an edge, where rounding would decide whether a
    token counts.
    """
    generator = torch.Generator().manual_seed(1)
    difference = torch.randn(outputs.shape, generator=generator, dtype=torch.float64) * spread
    return (outputs.detach() - _away(difference, edges, margin)).float()


def sampled(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """float32 [T]: the sampler's, from which DIS and DPPO drop some tokens on either side.

    Neither a ratio nor a difference of probabilities lies close to the edge where a token is
    dropped, or where a ratio is held.

    Args:
        logprobs: float64 [T], the model's.
        old_logprobs: float32 [T].
    """
    size = len(logprobs)
    aside = _noise(size, seed=4)
    jump = 3.0 * (aside > 1.3) - 3.0 * (aside < -1.3)
    found = (old_logprobs + 0.3 * _noise(size, seed=2) + jump).double()
    dis, dppo = ACTOR_LOSSES["DIS"], ACTOR_LOSSES["DPPO, sample-level"]
    edges = [math.log(x) for x in (1 - dis.dis_clip_low, 1 + dis.dis_clip_high)]
    ratios = (*edges, math.log(dppo.dppo_ratio_cap))
    moves = (-dppo.dppo_max_difference, dppo.dppo_max_difference)
    found = logprobs - _away(logprobs - found, ratios, 1e-3)
    found = (logprobs.exp() - _away(logprobs.exp() - found.exp(), moves, 1e-5)).log().float()
    for difference, places, margin in (
        (logprobs - found, ratios, 3e-4),
        (logprobs.exp() - found.exp(), moves, 3e-6),
    ):
        for place in places:
            assert float((difference - place).abs().min()) > margin
    return found


def _away(difference: Tensor, edges: Sequence[float], margin: float) -> Tensor:
    """The same, but at least the margin away from each edge."""
    for edge in edges:
        beside = torch.where(difference < edge, edge - margin, edge + margin)
        difference = torch.where((difference - edge).abs() < margin, beside, difference)
    return difference

"""The columns of a batch: what each response, and each of its tokens, has on its way to the losses.

One row is all that a column needs to be sent to the rank that trains on it, cut into microbatches,
written to a dump, checked for NaN and counted in the host memory that a run needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vapo_megatron.config import AlgorithmConfig


class Column(NamedTuple):
    """One tensor of a batch."""

    dtype: str
    """As numpy and torch call it. A loss mask may also be float32: a weight above 0."""
    about: str
    sampled: str = ""
    """Name in ScoredRollout.columns of the numbers that it arrives with, in 4 bytes each; none: the
    trainer computes it. Numbers that no response of a step has do not travel."""
    held: Callable[[AlgorithmConfig], bool] = lambda algorithm: True
    """Which runs have it; None stands for a column that is not computed."""

    @property
    def bytes(self) -> int:
        """Of one number."""
        return 1 if self.dtype == "bool" else int(self.dtype[-2:]) // 8


PER_RESPONSE = {
    "positions": Column("int64", "Rollout.position."),
    "prompt_lengths": Column("int64", "Tokens of the prompt."),
    "rewards": Column("float32", "Shaped reward of the verdict; it stands on the last token."),
    "is_correct": Column("bool", "The verifier's verdict, untouched by reward shaping."),
    "truncated": Column("bool", "Rollout.truncated."),
}
"""[B]"""

PER_TOKEN = {
    "places": Column(
        "int32",
        "Where the token stands in its sequence, from 0: it is predicted, and its value is read, "
        "one place before.",
        sampled="places",
    ),
    "rollout_logprobs": Column(
        "float32",
        "From the inference engine; None: the data gave the responses.",
        sampled="logprobs",
    ),
    "loss_mask": Column("bool", "True, or a weight above 0, where a token is trained on."),
    "policy_mask": Column(
        "float32",
        "Weight in the policy loss, loss_mask times the correction for the inference engine; None: "
        "loss_mask.",
        held=lambda a: a.sampler_correction != "none",
    ),
    "token_rewards": Column(
        "float32",
        "Rewards that were earned on the way, where there are any.",
        sampled="token_rewards",
        held=lambda a: False,
    ),
    "turn_starts": Column(
        "int32",
        "1 where a token begins a turn of an episode, else 0; None: each response is one turn.",
        sampled="turn_starts",
        held=lambda a: False,
    ),
    "is_positive": Column("bool", "In the positive-example LM loss: of a correct response."),
    "positive_weights": Column(
        "float32",
        "Weight in that loss; None: 1.",
        held=lambda a: a.positive_lm_weight == "advantage",
    ),
    "old_logprobs": Column("float32", "From the trainer, before this step's updates."),
    "reference_logprobs": Column(
        "float32",
        "From the frozen reference policy.",
        held=lambda a: "reference" in a.roles,
    ),
    "values": Column(
        "float32",
        "V of the state before each response token is emitted.",
        held=lambda a: "critic" in a.roles,
    ),
    "advantages": Column(
        "float32",
        "Of the response tokens.",
        held=lambda a: a.advantage_estimator != "none",
    ),
    "returns": Column(
        "float32",
        "Regression targets of the critic.",
        held=lambda a: "critic" in a.roles,
    ),
}
"""[T]"""

SAMPLED = {column.sampled: name for name, column in PER_TOKEN.items() if column.sampled}
"""Name of a scored response's numbers per token -> their column."""

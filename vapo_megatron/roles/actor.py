"""The actor: the policy that is trained and sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from vapo_megatron.algorithm.policy_loss import clipped_policy_loss, ratio_deviation, token_weights
from vapo_megatron.algorithm.positive_lm_loss import positive_lm_loss
from vapo_megatron.algorithm.reference_kl import reference_kl
from vapo_megatron.config import VapoConfig
from vapo_megatron.data.batch import Microbatch
from vapo_megatron.models.build import gather_hidden, output_weight
from vapo_megatron.models.hf_config import ModelShape
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.logprobs import linear_logprobs
from vapo_megatron.parallel.minibatches import MiniBatch
from vapo_megatron.parallel.optimizer import actor_learning_rate
from vapo_megatron.parallel.reduce import max_over_world
from vapo_megatron.parallel.schedule import forward_only
from vapo_megatron.roles.model import (
    FrozenModel,
    PlacedModel,
    TrainedModel,
    mean_of_updates,
)

# Before the first update of a step nothing has changed since old_logprobs were computed with the
# same microbatches, so that the ratio can differ from 1 by rounding alone.
RATIO_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def policy_logprobs(
    policy: PlacedModel,
    output: Tensor,
    microbatch: Microbatch,
    shape: ModelShape,
    config: VapoConfig,
    *,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """(logprobs, entropy) [T] of the response tokens at the rollout's temperature.

    Args:
        policy: the model.
        output: what it returned.
        microbatch: that it saw.
        shape, config: of the policy.
        with_entropy: False: None in its place.
    """
    hidden = gather_hidden(output, sequence_parallel=config.parallel.sequence_parallel)
    return linear_logprobs(
        hidden[microbatch.predicting],
        output_weight(policy.model[-1]),
        microbatch.targets,
        policy.ranks.tp_group,
        vocab_size=shape.vocab_size,
        temperature=config.rollout.temperature,
        with_entropy=with_entropy,
    )


class Actor:
    """Policy model with its optimizer; `trained.num_updates` counts its updates.

    Where value pretraining is the only stage it is frozen, and cannot be updated.
    """

    def __init__(
        self,
        shape: ModelShape,
        config: VapoConfig,
        ranks: Ranks,
        hf_path: str | None,
    ) -> None:
        """Build it; hf_path: weights to begin with, None: a checkpoint brings them."""
        self.shape, self.config, self.ranks = shape, config, ranks
        kind = TrainedModel if "actor" in config.algorithm.trained_roles else FrozenModel
        self.trained = kind(shape, config, ranks, "actor", hf_path)

    def compute_logprobs(self, microbatches: Sequence[Microbatch]) -> tuple[Tensor, Tensor]:
        """Return (logprobs, entropy) of the response tokens, no gradient; both float32 [T], CPU.

        T counts the microbatches' response tokens in order. Both are of the distribution at the
        rollout's temperature; entropy is in nats.
        """

        def head(output: Tensor, microbatch: Microbatch) -> Tensor:
            logprobs, entropy = policy_logprobs(
                self.trained, output, microbatch, self.shape, self.config, with_entropy=True
            )
            assert entropy is not None
            return torch.stack([logprobs, entropy], dim=-1)

        both = torch.cat(forward_only(self.trained.chunks, microbatches, head)).cpu()
        return both[:, 0].contiguous(), both[:, 1].contiguous()

    def update(self, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
        """Make one update per mini-batch.

        Loss (VAPO, section 4.3): clipped policy loss + mu * NLL of the correct responses
        + kl_coef * KL to the reference - entropy_coef * entropy, each divided by its own count over
        the whole mini-batch.

        Returns:
            Metrics averaged over the updates, see mean_of_updates; first_ratio_diff_max is the
            largest |ratio - 1| in the first mini-batch.

        Raises:
            UpdatesSkipped: on every rank.
        """
        assert isinstance(self.trained, TrainedModel)
        updates: list[dict[str, Tensor]] = []
        for mini_batch in mini_batches:
            deviation: list[Tensor] = []
            loss_function = partial(self._loss, mini_batch, deviation)
            rate = actor_learning_rate(self.trained.num_updates, self.config.optimizer)
            learned = self.trained.update(mini_batch, loss_function, rate)
            if not mini_batch.num_positive_tokens:
                # It has no mean, and a 0 would pull that of the other updates down.
                del learned["positive_lm_loss"]
            updates.append(learned)
            if len(updates) == 1:
                is_made = bool(updates[0]["grad_norm"].isfinite())
                first = self._check_ratio(deviation, is_made=is_made)
        totals = {"first_ratio_diff_max": first, **mean_of_updates(updates)}
        totals["learning_rate"] = torch.tensor(rate, dtype=torch.float64)
        return {f"actor/{name}": float(value) for name, value in totals.items()}

    def compute_gradients(self, mini_batch: MiniBatch) -> dict[str, Tensor]:
        """Leave the finished gradient of one mini-batch's loss in the buffers; return metrics."""
        assert isinstance(self.trained, TrainedModel)
        return self.trained.compute_gradients(mini_batch, partial(self._loss, mini_batch, []))

    def _loss(
        self,
        mini_batch: MiniBatch,
        deviation: list[Tensor],
        output: Tensor,
        microbatch: Microbatch,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        algorithm, batch = self.config.algorithm, microbatch.batch
        assert batch.old_logprobs is not None and batch.advantages is not None
        by_token = algorithm.loss_aggregation == "token"
        count = mini_batch.num_policy_tokens if by_token else mini_batch.num_policy_responses
        weights = token_weights(
            batch.policy_weights,
            batch.cu_seqlens,
            algorithm.loss_aggregation,
            max_response_tokens=self.config.rollout.max_response_tokens,
        )
        logprobs, entropy = policy_logprobs(
            self.trained,
            output,
            microbatch,
            self.shape,
            self.config,
            with_entropy=algorithm.entropy_coef > 0,
        )
        policy_loss, metrics = clipped_policy_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            weights,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            num_tokens=count,
            num_trained_tokens=mini_batch.num_policy_tokens,
        )
        positive = positive_lm_loss(
            logprobs,
            batch.loss_mask,
            batch.per_token(batch.is_correct),
            num_positive_tokens=mini_batch.num_positive_tokens,
        )
        loss = policy_loss + algorithm.positive_lm_coef * positive
        if entropy is not None:
            loss = loss - algorithm.entropy_coef * (entropy * weights).sum() / count.clamp(min=1)
        if algorithm.kl_coef > 0:
            assert batch.reference_logprobs is not None
            distance, of_distance = reference_kl(
                logprobs,
                batch.reference_logprobs,
                weights,
                num_tokens=count,
                num_trained_tokens=mini_batch.num_policy_tokens,
            )
            loss = loss + algorithm.kl_coef * distance
            metrics |= of_distance
        deviation.append(ratio_deviation(logprobs, batch.old_logprobs, batch.loss_mask))
        metrics = {
            **metrics,
            "policy_loss": policy_loss.detach(),
            "positive_lm_loss": positive.detach(),
            "loss": loss.detach(),
        }
        return loss, metrics

    def _check_ratio(self, deviation: list[Tensor], *, is_made: bool) -> Tensor:
        """Largest |ratio - 1| over all ranks, before anything was updated (RATIO_TOLERANCE).

        An update that was skipped, for a number that is not finite, may have any.
        """
        largest = torch.stack([torch.zeros(()), *(d.cpu() for d in deviation)]).max()
        largest = max_over_world(largest)
        limit = RATIO_TOLERANCE[self.config.model.dtype]
        assert not is_made or float(largest) <= limit, (
            f"the ratio at the step's first mini-batch differs from 1 by {float(largest):.3g} "
            f"(limit {limit:g}): the update does not see what old_logprobs were computed from"
        )
        return largest

"""One training step as in the paper, `train_step`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from vapo_megatron.algorithm.statistics import masked_sums
from vapo_megatron.algorithm.value_pretraining import actor_is_trained, bias_to_mean_return
from vapo_megatron.config import AlgorithmConfig
from vapo_megatron.config.metrics import emits
from vapo_megatron.config.phases import (
    ACTOR_UPDATE,
    ADVANTAGES,
    CRITIC_UPDATE,
    EVALUATION,
    EXCHANGE,
    LOGPROBS,
    REFERENCE_LOGPROBS,
    REWARD_SCORES,
    SYNC,
    VALUES,
)
from vapo_megatron.data.batch import RolloutBatch, StepSummary
from vapo_megatron.data.microbatch import Microbatch
from vapo_megatron.data.packing import StepPlan, plan_of
from vapo_megatron.data.rollout import ScoredRollout
from vapo_megatron.errors import Stopped
from vapo_megatron.models.partition import microbatch_options
from vapo_megatron.parallel.exchange import exchange, gather_summary
from vapo_megatron.parallel.minibatches import (
    MiniBatch,
    filled_in,
    make_microbatches,
    make_mini_batches,
    with_microbatches,
)
from vapo_megatron.parallel.reduce import any_rank, sum_over_data_parallel
from vapo_megatron.parallel.route_exchange import exchange_routes
from vapo_megatron.reward.checks import check_verdicts
from vapo_megatron.reward.scoring import with_scores
from vapo_megatron.roles.advantages import (
    means_of_values_and_returns,
    with_advantages,
    with_behaviour,
    with_loss_mask,
    with_policy_mask,
    with_positive_examples,
    with_verdicts,
)
from vapo_megatron.rollout.source import StepRequest
from vapo_megatron.run.skipped import kept_if_skipped
from vapo_megatron.run.step_metrics import (
    episode_metrics,
    logprob_difference,
    metrics_by_label,
    reward_spread,
    step_metrics,
)
from vapo_megatron.training.build import Built


class StepData(NamedTuple):
    """A step's training data and its metrics before the updates."""

    scored: list[ScoredRollout]
    """Verified responses that this rank sampled."""
    summary: StepSummary
    """Of the responses of all ranks."""
    batch: RolloutBatch
    """Everything that this data-parallel rank trains on."""
    entropy: Tensor | None
    """float32 [T], in nats, of the policy before the update on the batch's response tokens; None:
    given responses need no forward pass before it."""
    mini_batches: list[MiniBatch]
    critic_mini_batches: list[MiniBatch]
    """The same, behind the critic's prompts where it has its own."""
    metrics: dict[str, float]


class StepTrainer(Built):
    """Runs training steps; all ranks call the same methods in the same order."""

    def train_step(self, step: int) -> dict[str, float]:
        """Run one step of VAPO (arXiv 2504.05118) and return its metrics. step counts from 0."""
        config = self.config
        self.watchdog.step = step + 1
        self.early_stop.begin()
        data = self.prepare(step)

        # Last chance to stop: a step cannot be undone once weights change.
        if any_rank(not self.early_stop.has_time_to_finish()):
            raise Stopped

        # Update the critic, and after value pretraining also the actor.
        dump = partial(self.source.dump, scored=data.scored, algorithm=config.algorithm)
        with kept_if_skipped(self.run_dir, step + 1, dump, self.output.note) as learned:
            if self.critic is not None:
                with self.phase(CRITIC_UPDATE):
                    learned |= self.critic.update(data.critic_mini_batches)
            if self._trains_actor(step):
                with self.phase(ACTOR_UPDATE):
                    learned |= self.actor.update(data.mini_batches)
        if self._trains_actor(step):
            self.policy_version += 1
            learned |= self._publish()

        scored, summary, batch, entropy, *_ = data
        self.output.rollouts(step, scored, summary, batch, entropy, self.source)
        return {
            **step_metrics(
                summary, batch, entropy, config.algorithm, self.ranks, self.source.labels
            ),
            **episode_metrics(summary),
            **reward_spread(summary, uses_scores=config.reward.from_score is not None),
            **metrics_by_label(summary, self.source.labels),
            **data.metrics,
            **learned,
        }

    def prepare(self, step: int) -> StepData:
        """Everything before the updates: rollout, rewards, values, log-probabilities, advantages.

        Raises:
            Stopped: on every rank, once one of them has no time left.
        """
        config = self.config

        # Sample a group of responses per prompt and verify them on the ranks that sampled them.
        self._publish()
        trains_actor, has_time = self._trains_actor(step), self.early_stop.has_time_to_finish
        scored, metrics = self.source.rollouts(
            StepRequest(step, self.policy_version, self.phase, trains_actor, has_time)
        )
        with self.phase(EXCHANGE):
            summary, batch, plan = self._distribute(scored, step)
            batch = with_loss_mask(batch, config.algorithm)
            sizes = plan.microbatch_sizes(self.ranks.dp_rank)
            of_rank = microbatch_options(config.model, config.parallel, self.ranks)

            def microbatches_of(batch: RolloutBatch) -> list[Microbatch]:
                return make_microbatches(batch, itertools.chain(*sizes), **of_rank)

            microbatches = microbatches_of(batch)
            if config.algorithm.router_replay == "r3":
                self._hold_routes(scored, summary, plan, microbatches)
        of_critic = (
            microbatches if batch.critic_prompts is None else microbatches_of(batch.for_critic())
        )

        # Score what the reward model judges; then every response has its verdict and reward.
        if self.reward_model is not None:
            with self.phase(REWARD_SCORES):
                scores = self.reward_model.score_pending(summary, microbatches)
                summary, scored = with_scores(
                    summary, scored, scores, config.reward, config.rollout.max_response_tokens,
                    self.source.labels.of["verifier"],
                )  # fmt: skip
                batch = with_verdicts(batch, summary)
        self.source.keep(step, scored, self.phase)
        check_verdicts(summary, config.reward, scored, self.source.prompts, self.source.group)

        # V and log pi of the responses under the weights before the update.
        if self.critic is not None:
            with self.phase(VALUES):
                batch = batch.replace(values=self.critic.compute_values(of_critic))
                if step == 0 and config.model.value_head_bias == "mean_return":
                    means = means_of_values_and_returns(batch, config.algorithm.gamma, self.ranks)
                    value_range = config.algorithm.value_range
                    self.critic.shift(bias_to_mean_return(*means, value_range))
                    batch = batch.replace(values=self.critic.compute_values(of_critic))
        entropy = None
        if not summary.is_given:  # No loss on given responses is relative to an earlier policy.
            with self.phase(LOGPROBS):
                batch, entropy, compared = self._with_logprobs(step, batch, microbatches)
                metrics = {**metrics, **compared}
        if self.reference is not None and self._trains_actor(step):
            with self.phase(REFERENCE_LOGPROBS):
                of_reference = self.reference.compute_logprobs(microbatches)
                batch = batch.replace(reference_logprobs=of_reference)

        with self.phase(ADVANTAGES):
            batch = self.with_advantages(scored, summary, batch)
            filled = filled_in(microbatches, with_positive_examples(batch, config.algorithm))
            mini_batches = make_mini_batches(filled, map(len, sizes), self.ranks)
            of_critic = filled if of_critic is microbatches else filled_in(of_critic, batch)
            critic_mini_batches = with_microbatches(mini_batches, of_critic)
        return StepData(scored, summary, batch, entropy, mini_batches, critic_mini_batches, metrics)

    def with_advantages(
        self, scored: Sequence[ScoredRollout], summary: StepSummary, batch: RolloutBatch
    ) -> RolloutBatch:
        """Decoupled, length-adaptive GAE; without a critic, group-relative advantages.

        A subclass can put values of its own into the batch first, or look at what comes out.

        Args:
            scored: responses that this rank sampled.
            summary: of the responses of all ranks.
            batch: what this data-parallel rank trains on, with values and old_logprobs.
        """
        return with_advantages(summary, batch, self.config.algorithm, self.ranks)

    @emits("evaluation/nll_mean", "evaluation/nll_tokens")
    def held_out_loss(self) -> dict[str, float]:
        """Return the positive-example loss on given held-out responses; empty without any.

        Its mean is over all tokens of all of them, stop tokens included, and not over responses.

        Raises:
            Stopped: on every rank, once one of them has no time left.
        """
        count = self.source.num_held_out
        if not count:
            return {}
        if any_rank(not self.early_stop.has_time_to_evaluate()):
            raise Stopped
        # All of them at once: there is no update.
        sizes = {"responses_per_step": count, "mini_batch_size": count}
        algorithm = self.config.algorithm.model_copy(update=sizes)
        of_rank = microbatch_options(self.config.model, self.config.parallel, self.ranks)
        with self.phase(EVALUATION), self.phase(LOGPROBS):
            _, batch, plan = self._distribute(self.source.held_out(), 0, algorithm)
            (microbatches,) = plan.microbatch_sizes(self.ranks.dp_rank)
            logprobs, _ = self.actor.compute_logprobs(
                make_microbatches(batch, microbatches, **of_rank), replays=False
            )
            sums = masked_sums(logprobs, torch.ones_like(logprobs, dtype=torch.bool))
            tokens, total, _ = sum_over_data_parallel(sums, self.ranks).tolist()
        return {"evaluation/nll_mean": -total / tokens, "evaluation/nll_tokens": tokens}

    def _with_logprobs(
        self, step: int, batch: RolloutBatch, microbatches: Sequence[Microbatch]
    ) -> tuple[RolloutBatch, Tensor, dict[str, float]]:
        """Return the batch with what losses are relative to, the entropy [T], and metrics.

        Raises:
            LogprobsDiffer: on every rank; see logprob_difference.
        """
        config = self.config
        old_logprobs, entropy = self.actor.compute_logprobs(microbatches)
        batch = batch.replace(old_logprobs=old_logprobs)
        limit, is_stale = config.rollout.max_logprob_difference, config.rollout.is_stale
        difference = logprob_difference(batch, limit, self.ranks, is_stale=is_stale)
        difference |= self._compare_routes(step, batch, microbatches)
        batch, of_mask = with_policy_mask(batch, config.algorithm, self.ranks)
        return with_behaviour(batch, config.rollout), entropy, {**difference, **of_mask}

    def _hold_routes(
        self,
        scored: Sequence[ScoredRollout],
        summary: StepSummary,
        plan: StepPlan,
        microbatches: Sequence[Microbatch],
    ) -> None:
        """Send the sampler's routes to the ranks that train on the tokens, for all their passes."""
        replay = self.actor.replay
        assert replay is not None, "check_experts has refused models without experts"
        wanted = [plan.positions(dp_rank) for dp_rank in range(self.ranks.dp_size)]
        routes = exchange_routes(
            scored, summary, wanted, replay.layers, self.shape.experts_per_token,
            self.ranks, self.source.group,
        )  # fmt: skip
        parallel = self.config.parallel
        replay.hold(
            routes, microbatches,
            parts=self.ranks.tp_size if parallel.sequence_parallel else 1,
            part=self.ranks.tp_rank if parallel.sequence_parallel else 0,
            **microbatch_options(self.config.model, parallel, self.ranks),
        )  # fmt: skip

    @emits("rollout/other_routes_fraction", "rollout/logprob_diff_own_routes_mean")
    def _compare_routes(
        self, step: int, batch: RolloutBatch, microbatches: Sequence[Microbatch]
    ) -> dict[str, float]:
        """Return how far the trainer's own routes are from vLLM's, which it has just replayed.

        The share of (token, layer) with others, and every few steps the mean difference to vLLM's
        log-probabilities with its own routes, as rollout/logprob_diff_mean has it with vLLM's.
        """
        replay, every = self.actor.replay, self.config.rollout.compare_routes_every
        if replay is None or self.config.algorithm.router_replay != "r3":
            return {}
        found = {"rollout/other_routes_fraction": replay.take_other_fraction()}
        if every and step % every == 0:
            logprobs, _ = self.actor.compute_logprobs(microbatches, replays=False)
            difference = logprob_difference(batch.replace(old_logprobs=logprobs), None, self.ranks)
            found["rollout/logprob_diff_own_routes_mean"] = difference["rollout/logprob_diff_mean"]
        return found

    def _trains_actor(self, step: int) -> bool:
        return actor_is_trained(step, self.config.algorithm.value_pretraining_steps)

    def _distribute(
        self,
        scored: Sequence[ScoredRollout],
        step: int,
        algorithm: AlgorithmConfig | None = None,
    ) -> tuple[StepSummary, RolloutBatch, StepPlan]:
        """Plan the mini-batches from the lengths of all responses, then send each to its rank.

        algorithm: has the numbers of responses; None: the run's.
        """
        config, group = self.config, self.source.group
        algorithm = algorithm or config.algorithm
        summary = gather_summary(scored, algorithm.responses_per_step, group)
        plan = plan_of(
            summary.sequence_lengths, algorithm, config.parallel,
            hidden_size=self.shape.hidden_size, seed=config.seed, step=step,
        )  # fmt: skip
        wanted = [plan.positions(dp_rank) for dp_rank in range(self.ranks.dp_size)]
        return summary, exchange(scored, summary, wanted, self.ranks, group), plan

    def _publish(self) -> dict[str, float]:
        """Sync the actor's weights to vLLM unless it already has this version."""
        if self.source.holds(self.policy_version):
            return {}
        with self.phase(SYNC):
            return self.source.publish(self.actor.placed.chunks, self.policy_version)

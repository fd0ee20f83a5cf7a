"""One training step as in the paper, `train_step`, and the construction of what it needs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from vapo_megatron.algorithm.value_pretraining import actor_is_trained
from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import (
    ACTOR_UPDATE,
    ADVANTAGES,
    CRITIC_UPDATE,
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
from vapo_megatron.errors import ConfigError, Stopped
from vapo_megatron.models.hf_config import read_model_shape, read_reward_shape
from vapo_megatron.models.partition import cut_of
from vapo_megatron.parallel import backend, groups
from vapo_megatron.parallel.environment import check_processes
from vapo_megatron.parallel.exchange import exchange, gather_summary
from vapo_megatron.parallel.health.early_stop import EarlyStop
from vapo_megatron.parallel.health.watchdog import Watchdog
from vapo_megatron.parallel.minibatches import (
    MiniBatch,
    filled_in,
    make_microbatches,
    make_mini_batches,
    with_microbatches,
)
from vapo_megatron.parallel.offload import check_host_memory, is_on
from vapo_megatron.parallel.reduce import any_rank
from vapo_megatron.planning.host_memory import host_bytes
from vapo_megatron.reward.scoring import check_verdicts, with_scores
from vapo_megatron.reward.verifiers import default_name
from vapo_megatron.roles.actor import Actor, Reference
from vapo_megatron.roles.advantages import (
    with_advantages,
    with_behaviour,
    with_loss_mask,
    with_policy_mask,
    with_positive_examples,
    with_verdicts,
)
from vapo_megatron.roles.critic import Critic
from vapo_megatron.roles.device_schedule import DeviceSchedule
from vapo_megatron.roles.model import TrainedModel
from vapo_megatron.roles.reward_model import RewardModel
from vapo_megatron.rollout.disaggregated.source import RemoteSampling
from vapo_megatron.rollout.inputs import Inputs, read_inputs
from vapo_megatron.rollout.replay import Replay
from vapo_megatron.rollout.source import OnProgress, RolloutSource
from vapo_megatron.run.checkpoint import load as checkpoint
from vapo_megatron.run.output import RunOutput, kept_if_skipped
from vapo_megatron.run.step_metrics import (
    metrics_by_label,
    reward_spread,
    sampler_difference,
    step_metrics,
)


class StepData(NamedTuple):
    """A step's training data and its metrics before the updates."""

    scored: list[ScoredRollout]
    """Verified responses that this rank sampled."""
    summary: StepSummary
    """Of the responses of all ranks."""
    batch: RolloutBatch
    """Everything that this data-parallel rank trains on."""
    entropy: Tensor
    """float32 [T], in nats, of the policy before the update on the batch's response tokens."""
    mini_batches: list[MiniBatch]
    critic_mini_batches: list[MiniBatch]
    """The same, behind the critic's prompts where it has its own."""
    metrics: dict[str, float]


class StepTrainer:
    """Runs training steps; all ranks call the same methods in the same order."""

    def __init__(
        self,
        config: VapoConfig,
        replay: Path | None = None,
        inputs: Inputs | None = None,
        *,
        verifier: object | None = None,
    ) -> None:
        """Build everything that a run needs.

        Args:
            config: from load_config.
            replay: run directory whose dumped responses to train on; None: sample.
            inputs: from read_inputs; None: read them here.
            verifier: a function, or an instance or a class with the method of
                reward.verifier.Verifier, in place of reward.verifier; pickled for the processes
                that judge.

        Raises:
            UserError: what is wrong with the configuration, the files or the number of processes.
        """
        check_processes(config.parallel.world_size, config.rollout.num_processes)
        self.config = config
        self.run_dir = Path(config.logging.run_dir)
        torch.manual_seed(config.seed)
        self.sides = backend.initialize_distributed(
            config.parallel.timeout_seconds, config.rollout.num_processes
        )
        self.early_stop = EarlyStop(config.checkpoint.grace_seconds)
        rank, world_size = dist.get_rank(), config.num_processes
        self.watchdog = Watchdog(
            config.timeouts, self.run_dir, rank, world_size, self.early_stop.is_signalled,
            "trainer" if self.sides else "",
        )  # fmt: skip
        with self.watchdog.reporting():
            self._build(replay, inputs, verifier)

    def _build(self, replay: Path | None, inputs: Inputs | None, verifier: object | None) -> None:
        config = self.config if replay is None else self.config.for_replay()
        self.ranks = groups.initialize(config.parallel, config.seed)
        self.shape = inputs.shape if inputs else read_model_shape(str(config.model.hf_path))
        self._start = checkpoint.find_start(config)
        # vLLM first, because it measures free device memory; it sleeps while the models are built.
        self.source = self._source(replay, inputs, verifier)
        offloads = is_on(config.parallel)
        self.device_schedule = DeviceSchedule(self.source.leave_device, is_on=offloads)
        # After vLLM went to sleep, because a sleeping vLLM uses host memory too.
        self._check_host_memory(config, is_offloaded=offloads)
        hf_path = partial(self._start.path, config=config)
        self.actor = Actor(self.shape, config, self.ranks, hf_path("actor"))
        self.device_schedule.join("actor", self.actor.trained)
        self.critic: Critic | None = None
        if "critic" in config.algorithm.trained_roles:
            self.critic = Critic(self.shape, config, self.ranks, hf_path("critic"))
            self.device_schedule.join("critic", self.critic.trained)
        self.reference: Reference | None = None
        if "reference" in config.algorithm.roles:
            self.reference = Reference(self.shape, config, self.ranks)
            self.device_schedule.join("reference", self.reference.frozen)
        self.reward_model: RewardModel | None = None
        if "reward_model" in config.roles:
            shape = read_reward_shape(config.model, self.shape)
            self.reward_model = RewardModel(shape, config, self.ranks)
            self.device_schedule.join("reward_model", self.reward_model.frozen)
        self.policy_version = 0
        self.watchdog.report_progress(lambda: sum(m.num_tried for m in self._models.values()))
        self.output = RunOutput(self.config, self.ranks)

    def _check_host_memory(self, config: VapoConfig, *, is_offloaded: bool) -> None:
        """Check that each node has host memory for offload, checkpoints and a step; collective.

        Raises:
            ConfigError: on every rank, before the models are built.
        """
        needed = host_bytes(
            self.shape,
            config,
            pp_rank=self.ranks.pp_rank,
            is_first_replica=self.ranks.replica_rank == 0,
            is_offloaded=is_offloaded,
            keeps_rollouts=self.ranks.rank % config.rollout.tensor_model_parallel_size == 0,
        )
        remedies = ["checkpoint.asynchronous=false"] * config.checkpoint.asynchronous
        remedies += ["parallel.offload=false"] * is_offloaded
        remedies += ["a smaller rollout.lag"] * (config.rollout.lag > 0)
        remedies += ["a smaller algorithm.responses_per_step"]
        group = None if self.sides is None else self.sides.group
        check_host_memory(needed.by_purpose, config.parallel, remedies, group)

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

        _, summary, batch, entropy, *_ = data
        self.output.rollouts(step, data.scored, summary, batch, entropy, self.source)
        metrics = step_metrics(summary, batch, entropy, config.algorithm, self.ranks)
        uses_scores = config.reward.from_score is not None
        metrics |= reward_spread(summary, uses_scores=uses_scores)
        metrics |= metrics_by_label(summary, self.source.labels)
        return {**metrics, **data.metrics, **learned}

    def prepare(self, step: int) -> StepData:
        """Everything before the updates: rollout, rewards, values, log-probabilities, advantages.

        Raises:
            Stopped: on every rank, once one of them has no time left.
        """
        config = self.config

        # Sample a group of responses per prompt and verify them on the ranks that sampled them.
        self._publish()
        scored, metrics = self.source.rollouts(
            step,
            self.policy_version,
            self.phase,
            trains_actor=self._trains_actor(step),
            has_time=self.early_stop.has_time_to_finish,
        )
        with self.phase(EXCHANGE):
            summary, batch, plan = self._distribute(scored, step)
            batch = with_loss_mask(batch, config.algorithm)
        sizes = plan.microbatch_sizes(self.ranks.dp_rank)
        of_rank = cut_of(config.model, config.parallel, self.ranks)

        def cut(batch: RolloutBatch) -> list[Microbatch]:
            return make_microbatches(batch, itertools.chain(*sizes), **of_rank)

        microbatches = cut(batch)
        of_critic = microbatches if batch.critic_prompts is None else cut(batch.for_critic())

        # Score what the reward model judges; then every response has its verdict and reward.
        if self.reward_model is not None:
            with self.phase(REWARD_SCORES):
                scores = self.reward_model.score_pending(summary, microbatches)
                longest = config.rollout.max_response_tokens
                summary, scored = with_scores(
                    summary,
                    scored,
                    scores,
                    config.reward,
                    longest,
                    self.source.labels.of["verifier"],
                )
                batch = with_verdicts(batch, summary)
        self.source.keep(step, scored, self.phase)
        check_verdicts(summary, config.reward, scored, self.source.prompts, self.source.group)

        # V and log pi of the responses under the weights before the update.
        if self.critic is not None:
            with self.phase(VALUES):
                batch = batch.replace(values=self.critic.compute_values(of_critic))
        with self.phase(LOGPROBS):
            old_logprobs, entropy = self.actor.compute_logprobs(microbatches)
            batch = batch.replace(old_logprobs=old_logprobs)
            limit, is_stale = config.rollout.max_logprob_difference, config.rollout.is_stale
            difference = sampler_difference(batch, limit, self.ranks, is_stale=is_stale)
            batch, of_mask = with_policy_mask(batch, config.algorithm, self.ranks)
            batch = with_behaviour(batch, config.rollout)
        if self.reference is not None and self._trains_actor(step):
            with self.phase(REFERENCE_LOGPROBS):
                logprobs = self.reference.compute_logprobs(microbatches)
                batch = batch.replace(reference_logprobs=logprobs)

        with self.phase(ADVANTAGES):
            batch = self.with_advantages(scored, summary, batch)
            filled = filled_in(microbatches, with_positive_examples(batch, config.algorithm))
            mini_batches = make_mini_batches(filled, map(len, sizes), self.ranks)
            of_critic = filled if of_critic is microbatches else filled_in(of_critic, batch)
            critic_mini_batches = with_microbatches(mini_batches, of_critic)
        metrics = {**metrics, **difference, **of_mask}
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

    def _trains_actor(self, step: int) -> bool:
        return actor_is_trained(step, self.config.algorithm.value_pretraining_steps)

    @property
    def _models(self) -> dict[str, TrainedModel]:
        roles = self.config.algorithm.trained_roles
        return {role: getattr(self, role).trained for role in roles}

    def _source(
        self, replay: Path | None, inputs: Inputs | None, verifier: object | None
    ) -> RolloutSource:
        if replay is not None:
            return Replay(replay, self.ranks, default_name(self.config.reward, verifier))
        c, hf_path = self.config, str(self.config.model.hf_path)
        inputs = inputs or read_inputs(
            self.shape, hf_path, c.data, c.rollout, c.evaluation, seed=c.seed
        )
        inputs = inputs.agreed()
        if self.sides is not None:
            if verifier is not None or self.sides.is_sampler:
                raise ConfigError(
                    "rollout.placement=disaggregated: process "
                    f"{self.sides.rank} of {self.sides.world_size} is given "
                    f"{'a verifier' if verifier is not None else 'a trainer'}, but the last "
                    f"{self.sides.num_samplers} processes sample and judge; give them "
                    "rollout.disaggregated.server.Server, with the verifier"
                )
            return RemoteSampling(
                inputs, self.ranks, self.sides, model=c.model, rollout=c.rollout,
                algorithm=c.algorithm, logging=c.logging, waiting=self.watchdog.waiting,
            )  # fmt: skip
        # Imported here, because only what samples may import vLLM.
        from vapo_megatron.rollout.sampling import Sampling

        return Sampling(
            inputs, self.ranks, model=c.model, rollout=c.rollout, algorithm=c.algorithm,
            reward=c.reward, evaluation=c.evaluation, logging=c.logging,
            seed=c.seed, offload=is_on(c.parallel), verifier=verifier,
        )  # fmt: skip

    def _distribute(
        self, scored: Sequence[ScoredRollout], step: int
    ) -> tuple[StepSummary, RolloutBatch, StepPlan]:
        """Plan the mini-batches from the lengths of all responses, then send each to its rank."""
        config, group = self.config, self.source.group
        summary = gather_summary(scored, config.algorithm.responses_per_step, group)
        plan = plan_of(
            summary.sequence_lengths, config.algorithm, config.parallel,
            hidden_size=self.shape.hidden_size, seed=config.seed, step=step,
        )  # fmt: skip
        wanted = [plan.positions(dp_rank) for dp_rank in range(self.ranks.dp_size)]
        return summary, exchange(scored, summary, wanted, self.ranks, group), plan

    def _publish(self) -> dict[str, float]:
        """Sync the actor's weights to vLLM unless it already has this version."""
        if self.source.holds(self.policy_version):
            return {}
        with self.phase(SYNC):
            return self.source.publish(self.actor.trained.chunks, self.policy_version)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[OnProgress]:
        """Enter a phase: watchdog, timing, display, device; yields a callback for (done, total)."""
        with (
            self.watchdog.phase(name),
            self.output.phase(name) as on_progress,
            self.device_schedule(name),
        ):
            yield on_progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is not None:
            self.watchdog.fail(error)
        with self.watchdog.reporting():
            # First, because vLLM needs memory to wake up, and an error may have left a model there.
            self.device_schedule.close()
            self.source.close()
            if error is None:
                # No rank leaves while others may still communicate with it.
                dist.barrier(group=self.source.group)
            if self.sides is not None:
                self.sides.close()
            groups.destroy()
            dist.destroy_process_group()
        self.watchdog.close()

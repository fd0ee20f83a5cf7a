"""VAPO's loop. `train_step` is the algorithm; everything else here prepares, resumes or saves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vapo_megatron.algorithm.value_pretraining import actor_is_trained, critic_has_settled
from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import (
    ACTOR_UPDATE,
    ADVANTAGES,
    CHECKPOINT,
    CRITIC_UPDATE,
    EXCHANGE,
    EXPORT,
    LOGPROBS,
    REFERENCE_LOGPROBS,
    SYNC,
    VALUES,
)
from vapo_megatron.data.batch import RolloutBatch, ScoredRollout, StepSummary
from vapo_megatron.data.packing import attention_tokens, plan_mini_batches
from vapo_megatron.errors import Stopped
from vapo_megatron.models.hf_config import read_model_shape
from vapo_megatron.parallel import backend, groups
from vapo_megatron.parallel.exchange import exchange, gather_summary
from vapo_megatron.parallel.health.early_stop import EarlyStop
from vapo_megatron.parallel.health.watchdog import Watchdog
from vapo_megatron.parallel.minibatches import (
    local_plan,
    make_microbatches,
    make_mini_batches,
    packed_multiple,
)
from vapo_megatron.parallel.offload import check_host_memory, is_on
from vapo_megatron.parallel.reduce import any_rank
from vapo_megatron.planning.host_memory import host_bytes
from vapo_megatron.roles.actor import Actor
from vapo_megatron.roles.advantages import with_advantages, with_loss_mask
from vapo_megatron.roles.critic import Critic
from vapo_megatron.roles.device_schedule import DeviceSchedule
from vapo_megatron.roles.model import TrainedModel
from vapo_megatron.roles.policy_mask import with_policy_mask
from vapo_megatron.roles.reference import Reference
from vapo_megatron.rollout.replay import Replay
from vapo_megatron.rollout.source import OnProgress, RolloutSource
from vapo_megatron.run.checkpoint import load as checkpoint
from vapo_megatron.run.checkpoint.writer import CheckpointWriter
from vapo_megatron.run.output import RunOutput
from vapo_megatron.run.report.page import build_report
from vapo_megatron.run.skipped_updates import kept_if_skipped
from vapo_megatron.run.step_metrics import sampler_difference, step_metrics
from vapo_megatron.weights.load_hf import export_hf

Plan = Sequence[Sequence[Sequence[int]]]


class VapoTrainer:
    """One process's part of a run; every rank calls the same methods in the same order."""

    def __init__(self, config: VapoConfig, replay: Path | None = None) -> None:
        """Build everything that a run needs.

        Args:
            config: checked.
            replay: train on the responses that this run directory dumped; None: sample.
        """
        self.config = config
        self.run_dir = Path(config.logging.run_dir)
        torch.manual_seed(config.seed)
        backend.initialize_distributed(config.parallel.timeout_seconds)
        self.early_stop = EarlyStop(config.checkpoint.grace_seconds)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.watchdog = Watchdog(
            config.timeouts, self.run_dir, rank, world_size, self.early_stop.look
        )
        with self.watchdog.reporting():
            self._build(replay)

    def _build(self, replay: Path | None) -> None:
        config = self.config
        self.ranks = groups.initialize(config.parallel, config.seed)
        self.shape = read_model_shape(str(config.model.hf_path))
        self._start = checkpoint.find_start(config)
        # First, for vLLM measures what is free on the device; it leaves before the models come.
        self.source = self._source(replay)
        offloads = is_on(config.parallel)
        self.device_schedule = DeviceSchedule(self.source.leave_device, is_on=offloads)
        # Once vLLM has left, for it keeps some of itself in host memory while it sleeps.
        self._check_host_memory(is_offloaded=offloads)
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
        self.policy_version = 0
        self.explained_variances: list[float] = []
        self.watchdog.report_progress(lambda: sum(m.num_tried for m in self._models.values()))
        self.output = RunOutput(config, self.ranks)
        self._kept: tuple[int, dict[str, Any]] = (0, {})
        """Steps done, and the state that a checkpoint of them has."""
        self._saved = 0
        """Steps of the latest checkpoint."""
        self._unevaluated: dict[str, float] | None = None
        """The last step's row, where the run was stopped before its evaluation had ended."""

    def _check_host_memory(self, *, is_offloaded: bool) -> None:
        """Refuse a node without room for what is offloaded and for a checkpoint; collective.

        Raises:
            ConfigError: on every rank, before the models are built.
        """
        config = self.config
        needed = host_bytes(
            self.shape,
            config,
            pp_rank=self.ranks.pp_rank,
            is_first_replica=self.ranks.dp_rank == 0,
            is_offloaded=is_offloaded,
        )
        remedies = ["checkpoint.asynchronous=false"] * config.checkpoint.asynchronous
        remedies += ["parallel.offload=false"] * is_offloaded
        if remedies:
            parts = {"what is offloaded": needed.offloaded, "a checkpoint": needed.checkpoint}
            check_host_memory(parts, config.parallel, remedies)

    def train_step(self, step: int) -> dict[str, float]:
        """Make one step of VAPO (arXiv 2504.05118); return its metrics. step counts from 0."""
        config = self.config
        trains_actor = actor_is_trained(step, config.algorithm.value_pretraining_steps)
        self.watchdog.step = step + 1
        self.early_stop.begin()

        # Sample a group of responses to each prompt, and judge them where they were sampled.
        self._publish()
        scored, sampling_metrics = self.source.rollouts(
            step,
            self.policy_version,
            self._phase,
            trains_actor=trains_actor,
            has_time=self.early_stop.has_time_to_finish,
        )
        with self._phase(EXCHANGE):
            summary, batch, plan = self._distribute(scored, step)
            batch = with_loss_mask(batch, config.algorithm)

        # V and log pi of what was sampled, before anything is updated.
        microbatches = [m for part in plan for m in self._microbatches(batch, part)]
        if self.critic is not None:
            with self._phase(VALUES):
                batch = batch.replace(values=self.critic.compute_values(microbatches))
        with self._phase(LOGPROBS):
            old_logprobs, entropy = self.actor.compute_logprobs(microbatches)
            batch = batch.replace(old_logprobs=old_logprobs)
            difference = sampler_difference(
                batch, config.rollout.max_logprob_difference, self.ranks
            )
            batch, of_mask = with_policy_mask(batch, config.algorithm, self.ranks)
        if self.reference is not None and trains_actor:
            with self._phase(REFERENCE_LOGPROBS):
                reference_logprobs = self.reference.compute_logprobs(microbatches)
                batch = batch.replace(reference_logprobs=reference_logprobs)

        # Decoupled, length-adaptive GAE; without a critic, each response against its group.
        with self._phase(ADVANTAGES):
            batch = with_advantages(summary, batch, config.algorithm, self.ranks)
            mini_batches = make_mini_batches(batch, plan, self.ranks, multiple_of=self._multiple)

        # From here on the step cannot be taken back.
        self._stop_unless(self.early_stop.has_time_to_finish())

        # Learn: the critic always, the actor once value pretraining is over.
        with kept_if_skipped(config, step + 1, scored, self.output.note) as learned:
            if self.critic is not None:
                with self._phase(CRITIC_UPDATE):
                    learned |= self.critic.update(mini_batches)
            if trains_actor:
                with self._phase(ACTOR_UPDATE):
                    learned |= self.actor.update(mini_batches)
        if trains_actor:
            self.policy_version += 1
            learned |= self._publish()

        self.output.rollouts(step, scored, summary, batch, entropy, self.source.decode)
        metrics = step_metrics(summary, batch, entropy, config.algorithm, self.ranks)
        metrics |= sampling_metrics | difference | of_mask
        return {**metrics, **learned}

    def fit(self) -> None:
        """Resume or start, run every step, and leave a checkpoint, an HF export and a report."""
        config, start = self.config, self._resume()
        self._publish()
        writer = CheckpointWriter(self._checkpoints, config.checkpoint)
        with self.output.opened(start, is_unevaluated=self._unevaluated is not None), writer:
            if self.source.note:
                self.output.note(self.source.note)
            self._keep(start)
            try:
                self._run(start, writer)
                self._finish()
            except Stopped:
                self._stop(writer)

    def _run(self, done: int, writer: CheckpointWriter) -> None:
        """Make the steps after the first `done` ones.

        Raises:
            Stopped: an early signal has come; what was kept last can be saved.
        """
        config, learns = self.config, self.config.algorithm.trained_roles
        if done == 0 or self._unevaluated is not None:
            self._row(done, self._unevaluated or {}, is_evaluated=True)
        while not self._is_over(done):
            metrics = self.train_step(done)
            done += 1
            if learns == ("critic",):
                self.explained_variances.append(metrics["critic/explained_variance"])
            is_over = self._is_over(done)
            is_due = is_over or _due(done, config.evaluation.every_steps)
            # The row first: a resume drops rows after its checkpoint, but cannot make one up.
            self._row(done, metrics, is_evaluated="actor" in learns and is_due)
            stops = any_rank(self.early_stop.look())
            if stops and not is_over:
                raise Stopped
            if is_over or _due(done, config.checkpoint.every_steps):
                self._save(writer, waits=is_over)
            else:
                writer.poll()
            self.early_stop.save_seconds = writer.seconds

    def _row(self, done: int, metrics: dict[str, float], *, is_evaluated: bool) -> None:
        """Write the row of a step, after its evaluation where there is one."""
        if is_evaluated:
            # Another process could not tell the speed of these tokens.
            known = {name: metrics[name] for name in metrics if name != "num_tokens"}
            self._keep(done, unevaluated=known)
            self.early_stop.begin()
            metrics |= self._evaluate(done)
        self.early_stop.learn(self.output.step(done, metrics))
        self._keep(done)

    def _keep(self, done: int, unevaluated: dict[str, float] | None = None) -> None:
        """Remember what belongs to the models as they are now."""
        self._kept = done, {**self._state(), "unevaluated": unevaluated and dict(unevaluated)}

    def _save(self, writer: CheckpointWriter, *, waits: bool) -> None:
        """Begin the checkpoint of what was kept, unless there is one; waits: have it on disk."""
        done, state = self._kept
        with self._phase(CHECKPOINT):
            if done > self._saved:
                writer.save(done, self._models, state)
                self._saved = done
            if waits:
                writer.wait()

    def _stop_unless(self, has_time: bool) -> None:
        """Raise Stopped on every rank if one of them lacks time."""
        if any_rank(not has_time):
            raise Stopped

    def _stop(self, writer: CheckpointWriter) -> None:
        """Leave a checkpoint of the last whole step."""
        self._save(writer, waits=True)
        name = self.early_stop.signal_name or "an early signal"
        self.output.note(f"stopped by {name} after step {self._kept[0]}; start it again")

    def _is_over(self, done: int) -> bool:
        """Have all steps been made, or has the critic settled before, where that is asked for?"""
        algorithm = self.config.algorithm
        patience = algorithm.value_pretraining_patience
        settled = patience is not None and critic_has_settled(self.explained_variances, patience)
        return done >= algorithm.num_steps or settled

    def _finish(self) -> None:
        export = self.run_dir / "hf_export"
        if self.config.checkpoint.hf_export and "actor" in self._models:
            source = str(self.config.model.hf_path)
            self.output.note(f"exporting the actor to {export}")
            with self.watchdog.phase(EXPORT), self.device_schedule(EXPORT):
                chunks = self.actor.trained.chunks
                export_hf(chunks, self.shape, self.ranks, export, copy_from=source)
        if self.ranks.rank == 0:
            report = build_report(self.run_dir)
            self.output.note(f"done: {report}" + (f" and {export}" if export.exists() else ""))

    def _resume(self) -> int:
        """Load the run's own checkpoint, or the critic that a new run starts from."""
        if self._start.critic is not None and self.config.model.critic_checkpoint_optimizer:
            assert self.critic is not None, "a configuration without a critic is refused"
            checkpoint.load_critic(*self._start.critic, self.config, self.critic.trained)
        if self._start.own is None:
            return 0
        done, state = checkpoint.load_run(self._start.own, self._models)
        self.source.load_state_dict(state["data"])
        self.policy_version = state["policy_version"]
        self.explained_variances = state.get("explained_variances", [])
        for role, skipped in state.get("skipped_in_a_row", {}).items():
            self._models[role].skipped_in_a_row = skipped
        self._unevaluated = state.get("unevaluated")
        self._saved = done
        return done

    def _state(self) -> dict[str, Any]:
        return {
            "data": self.source.state_dict(),
            "policy_version": self.policy_version,
            "explained_variances": self.explained_variances,
            "skipped_in_a_row": {r: m.skipped_in_a_row for r, m in self._models.items()},
        }

    @property
    def _checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def _models(self) -> dict[str, TrainedModel]:
        roles = self.config.algorithm.trained_roles
        return {role: getattr(self, role).trained for role in roles}

    def _source(self, replay: Path | None) -> RolloutSource:
        if replay is not None:
            return Replay(replay, self.ranks)
        # Here, because a replay must not load vLLM.
        from vapo_megatron.rollout.sampling import Sampling

        return Sampling(self.config, self.shape, self.ranks)

    def _distribute(
        self, scored: Sequence[ScoredRollout], step: int
    ) -> tuple[StepSummary, RolloutBatch, Plan]:
        """Plan the step's mini-batches from all lengths, then move each response once."""
        summary = gather_summary(scored, self.config.algorithm.responses_per_step)
        plans = plan_mini_batches(
            summary.sequence_lengths,
            mini_batch_size=self.config.algorithm.mini_batch_size,
            dp_size=self.ranks.dp_size,
            max_tokens_per_microbatch=self.config.parallel.max_tokens_per_microbatch,
            seed=self.config.seed * 1_000_003 + step,
            attention_tokens=attention_tokens(self.shape.hidden_size),
        )
        by_rank = [[plan.microbatches[r] for plan in plans] for r in range(self.ranks.dp_size)]
        wanted = [[p for mini in rank for micro in mini for p in micro] for rank in by_rank]
        batch = exchange(scored, summary, wanted, self.ranks)
        return summary, batch, local_plan(by_rank[self.ranks.dp_rank])

    def _publish(self) -> dict[str, float]:
        """Give the sampler the actor's weights, unless it holds them."""
        if self.source.holds(self.policy_version):
            return {}
        with self._phase(SYNC):
            return self.source.publish(self.actor.trained.chunks, self.policy_version)

    def _evaluate(self, done: int) -> dict[str, float]:
        self._publish()
        metrics, correct = self.source.evaluate(
            self.policy_version, self._phase, self.early_stop.has_time_to_evaluate
        )
        self.output.evaluation(done, correct)
        return metrics

    def _microbatches(self, batch: RolloutBatch, part: Sequence[Sequence[int]]) -> list[Any]:
        return make_microbatches(batch, part, multiple_of=self._multiple)

    @property
    def _multiple(self) -> int:
        return packed_multiple(self.config.parallel, self.config.model.fp8)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[OnProgress]:
        """Take the phase's turn, time it and show it; yields a callback for (done, total)."""
        with (
            self.watchdog.phase(name),
            self.output.phase(name) as on_progress,
            self.device_schedule(name),
        ):
            yield on_progress

    def __enter__(self) -> VapoTrainer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is not None:
            self.watchdog.fail(error)
        with self.watchdog.reporting():
            # First, for vLLM needs room to wake up in, and an error may have ended a model's turn.
            self.device_schedule.close()
            self.source.close()
            if error is None:
                # Nobody leaves while others may still need it.
                dist.barrier()
            groups.destroy()
            dist.destroy_process_group()
        self.watchdog.close()


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0

"""The training loop: steps, evaluation, checkpoints, resume and preemption."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from vapo_megatron.algorithm.value_pretraining import critic_has_settled, error_is_large
from vapo_megatron.config.phases import CHECKPOINT, EXPORT
from vapo_megatron.errors import INTERRUPTED, Stopped, report
from vapo_megatron.parallel.reduce import any_rank
from vapo_megatron.planning.disk import check_disk
from vapo_megatron.run.checkpoint import load as checkpoint
from vapo_megatron.run.checkpoint.writer import CheckpointWriter
from vapo_megatron.run.report.page import build_report
from vapo_megatron.run.signs import about_value_error
from vapo_megatron.training.step import StepTrainer
from vapo_megatron.weights.export_hf import export_hf
from vapo_megatron.weights.peft import export_adapters
from vapo_megatron.weights.peft_files import base_digest


class VapoTrainer(StepTrainer):
    """Runs the training loop with `fit`; a context manager.

    All ranks call the same methods in the same order.
    """

    explained_variances: list[float]
    """One per step with stage=value_pretraining, from before the update."""
    value_error_is_large: bool
    """Of the last step of value pretraining."""
    is_interrupted = False
    """SIGINT has stopped the run before its last step."""
    _snapshot: tuple[int, dict[str, Any]]
    """Steps done, and the checkpoint state after them."""
    _saved: int
    """Steps done at the latest checkpoint."""
    _unevaluated: dict[str, float] | None
    """Metrics of the last step if the run was stopped before its evaluation finished."""
    _base: str | None
    """Digest of the weights below adapters."""
    _changed: list[str]
    """Settings that the checkpoint was made with, and today's."""

    def fit(self) -> None:
        """Start or resume, run all steps, and write a checkpoint, an HF export and a report."""
        config, start = self.config, self._resume()
        self._publish()
        writer = CheckpointWriter(self._checkpoints, config.checkpoint)
        stopped = ""
        with self.output.opened(start, is_unevaluated=self._unevaluated is not None), writer:
            for line in self._notes():
                self.output.note(line)
            self._take_snapshot(start)
            self.early_stop.announce = self.output.note
            try:
                self._run(start, writer)
                self._finish()
            except Stopped:
                stopped = self._stop(writer)
        # After the live display, as the last thing on the screen.
        self.is_interrupted = bool(stopped) and self.early_stop.signal_name == "SIGINT"
        if self.is_interrupted:
            report(stopped, INTERRUPTED)
        elif stopped and self.ranks.rank == 0:
            print(stopped, flush=True)

    def _notes(self) -> list[str]:
        """Return what the user should know before the first step; only the main rank shows it."""
        notes = [self.source.note] if self.source.note else []
        notes += [f"changed since {self._start.own}: {line}" for line in self._changed]
        return notes + (check_disk(self.config, self.shape) if self.ranks.rank == 0 else [])

    def _run(self, done: int, writer: CheckpointWriter) -> None:
        """Run the steps after the first `done` ones.

        Raises:
            Stopped: a stop signal has arrived; the last snapshot is still to be saved.
        """
        config, learns = self.config, self.config.algorithm.trained_roles
        pretrains = learns == ("critic",)
        if done == 0 or self._unevaluated is not None:
            self._write_row(done, self._unevaluated or {}, is_evaluated=True)
        while not self._is_finished(done):
            metrics = self.train_step(done)
            done += 1
            if pretrains:
                self.explained_variances.append(metrics["critic/explained_variance"])
                errors = metrics["critic/value_error_mean"], metrics["critic/return_std"]
                self.value_error_is_large = error_is_large(*errors)
            is_last = self._is_finished(done)
            if is_last if pretrains else done == config.algorithm.value_pretraining_steps:
                for line in about_value_error(metrics, config):
                    self.output.note(line)
            is_due = is_last or _is_due(done, config.evaluation.every_steps)
            # Before the checkpoint: a resume drops surplus rows but cannot restore a missing one.
            self._write_row(done, metrics, is_evaluated="actor" in learns and is_due)
            stops = any_rank(self.early_stop.is_signalled())
            if stops and not is_last:
                raise Stopped
            if is_last or _is_due(done, config.checkpoint.every_steps):
                self._save(writer, waits=is_last)
            else:
                writer.poll()
            self.early_stop.save_seconds = writer.seconds

    def _write_row(self, done: int, metrics: dict[str, float], *, is_evaluated: bool) -> None:
        """Evaluate if requested, then write the step's metrics."""
        if is_evaluated:
            # Without num_tokens: a resumed process cannot compute this step's tokens per second.
            known = {name: metrics[name] for name in metrics if name != "num_tokens"}
            self._take_snapshot(done, unevaluated=known)
            self.early_stop.begin()
            metrics |= self._evaluate(done)
        self.early_stop.record(self.output.step(done, metrics, self.source.rollout_spans))
        self._take_snapshot(done)

    def _take_snapshot(self, done: int, unevaluated: dict[str, float] | None = None) -> None:
        """Remember the checkpoint state that belongs to the current weights."""
        self._snapshot = done, {**self._state(), "unevaluated": unevaluated and dict(unevaluated)}

    def _save(self, writer: CheckpointWriter, *, waits: bool) -> None:
        """Start writing the last snapshot unless it is saved; waits: until it is on disk.

        Nothing is saved if there is no time left to finish what the rollout workers still sample.
        """
        done, state = self._snapshot
        with self.phase(CHECKPOINT):
            if done > self._saved and self.source.finish_in_flight(
                done, self.early_stop.has_time_to_save
            ):
                in_flight = partial(self.source.save_in_flight, done)
                writer.save(done, self._models, state, in_flight)
                self._saved = done
            if waits:
                writer.wait()

    def _stop(self, writer: CheckpointWriter) -> str:
        """Save the last complete step; return a line about it."""
        self._save(writer, waits=True)
        name = self.early_stop.signal_name or "a signal to another rank"
        done = self._snapshot[0]
        lost = "" if self._saved == done else (
            f", which lacks responses that were still sampled: it resumes from step {self._saved}"
        )  # fmt: skip
        return f"stopped by {name} after step {done}{lost}; start it again to resume"

    def _is_finished(self, done: int) -> bool:
        """Whether all steps are done, or value pretraining has stopped early."""
        algorithm = self.config.algorithm
        patience = algorithm.value_pretraining_patience
        settled = patience is not None and critic_has_settled(
            self.explained_variances, patience, self.value_error_is_large
        )
        return done >= algorithm.num_steps or settled

    def _finish(self) -> None:
        export, lora = self.run_dir / "hf_export", self.config.model.lora
        if self.config.checkpoint.hf_export and "actor" in self._models:
            source = str(self.config.model.hf_path)
            self.output.note(f"exporting the actor to {export}")
            with self.watchdog.phase(EXPORT), self.device_schedule(EXPORT):
                stops = self.source.stop_token_ids or self.config.rollout.stop_token_ids
                actor, step = (self.actor.placed.chunks, self.shape, self.ranks), self._snapshot[0]
                export_hf(*actor, export, copy_from=source, step=step, stop_token_ids=stops)
                if lora.of("actor"):
                    adapters = self.run_dir / "adapter_export"
                    export_adapters(*actor, adapters, source, lora, step=step, stop_token_ids=stops)
        if self.ranks.rank == 0:
            report = build_report(self.run_dir)
            self.output.note(f"done: {report}" + (f" and {export}" if export.exists() else ""))

    def _resume(self) -> int:
        """Load the run's checkpoint or critic_checkpoint's optimizer; return the steps done."""
        self._saved, self._unevaluated, self._changed = 0, None, []
        path, lora = str(self.config.model.hf_path), self.config.model.lora
        self._base = None if lora.rank is None else base_digest(path)
        self.explained_variances, self.value_error_is_large = [], False
        if self._start.critic is not None:
            assert self.critic is not None, "critic_checkpoint without a critic is a ConfigError"
            model, critic = self.config.model, self.critic.trained
            if model.critic_checkpoint_optimizer:
                checkpoint.load_critic(*self._start.critic, self.config, critic)
            elif model.lora.of("critic"):
                checkpoint.load_critic_adapters(self._start.critic[0], critic)
        if self._start.own is None:
            return 0
        done, state = checkpoint.load_run(self._start.own, self._models)
        checkpoint.check_base(self._start.own, state.get("base"), self._base, path)
        self.source.load_state_dict(state["data"])
        self.source.resume(done, self._start.own)
        self.policy_version = state["policy_version"]
        self.explained_variances = state.get("explained_variances", [])
        self.value_error_is_large = state.get("value_error_is_large", False)
        for role, skipped in state.get("skipped_in_a_row", {}).items():
            self._models[role].skipped_in_a_row = skipped
        self._unevaluated = state.get("unevaluated")
        self._changed = checkpoint.changed_settings(state, self.config)
        self._saved = done
        return done

    def _state(self) -> dict[str, Any]:
        return {
            "data": self.source.state_dict(),
            "policy_version": self.policy_version,
            "explained_variances": self.explained_variances,
            "value_error_is_large": self.value_error_is_large,
            "value_range": self.config.algorithm.value_range,
            "skipped_in_a_row": {r: m.skipped_in_a_row for r, m in self._models.items()},
            "config": self.config.model_dump(mode="json"),
            "stop_token_ids": list(self.source.stop_token_ids),
            "date": self.source.date,
            "base": self._base,
        }

    @property
    def _checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def _evaluate(self, done: int) -> dict[str, float]:
        self._publish()
        metrics, correct = self.source.evaluate(
            self.policy_version, self.phase, self.early_stop.has_time_to_evaluate
        )
        self.output.evaluation(done, correct)
        return metrics | self.held_out_loss()


def _is_due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0

"""A run: its steps, saving, resuming, stopping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vapo_megatron.algorithm.value_pretraining import critic_has_settled
from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import CHECKPOINT, EXPORT
from vapo_megatron.errors import Stopped
from vapo_megatron.parallel.reduce import any_rank
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.run.checkpoint import load as checkpoint
from vapo_megatron.run.checkpoint.writer import CheckpointWriter
from vapo_megatron.run.report.page import build_report
from vapo_megatron.trainer import StepTrainer
from vapo_megatron.weights.load_hf import export_hf


class VapoTrainer(StepTrainer):
    """One process's part of a run: `fit` makes every step that is missing.

    Every rank calls the same methods in the same order; a context manager.
    """

    def __init__(
        self, config: VapoConfig, replay: Path | None = None, inputs: Inputs | None = None
    ) -> None:
        """Build everything that a run needs.

        Args:
            config: checked.
            replay: train on the responses that this run directory dumped; None: sample.
            inputs: what was read already; None: read it here.
        """
        super().__init__(config, replay, inputs)
        self.explained_variances: list[float] = []
        """Of each step of a value-pretraining stage, before its update."""
        self._kept: tuple[int, dict[str, Any]] = (0, {})
        """Steps done, and the state that a checkpoint of them has."""
        self._saved = 0
        """Steps of the latest checkpoint."""
        self._unevaluated: dict[str, float] | None = None
        """The last step's row, where the run was stopped before its evaluation had ended."""

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
            stops = any_rank(self.early_stop.is_signalled())
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
        self.early_stop.record(self.output.step(done, metrics))
        self._keep(done)

    def _keep(self, done: int, unevaluated: dict[str, float] | None = None) -> None:
        """Remember what belongs to the models as they are now."""
        self._kept = done, {**self._state(), "unevaluated": unevaluated and dict(unevaluated)}

    def _save(self, writer: CheckpointWriter, *, waits: bool) -> None:
        """Begin the checkpoint of what was kept, unless there is one; waits: have it on disk."""
        done, state = self._kept
        with self.phase(CHECKPOINT):
            if done > self._saved:
                writer.save(done, self._models, state)
                self._saved = done
            if waits:
                writer.wait()

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

    def _evaluate(self, done: int) -> dict[str, float]:
        self._publish()
        metrics, correct = self.source.evaluate(
            self.policy_version, self.phase, self.early_stop.has_time_to_evaluate
        )
        self.output.evaluation(done, correct)
        return metrics


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0

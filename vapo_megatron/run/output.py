"""A run's output: the display, a row per step, some responses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from vapo_megatron.algorithm.agreement import far_maximum
from vapo_megatron.config import VapoConfig
from vapo_megatron.config.phases import Span
from vapo_megatron.config.techniques import algorithm_name
from vapo_megatron.data.batch import RolloutBatch, StepSummary
from vapo_megatron.data.disk_errors import writing
from vapo_megatron.data.lock import lock_run
from vapo_megatron.data.rollout import ScoredRollout
from vapo_megatron.data.storage import replace_file
from vapo_megatron.parallel import backend
from vapo_megatron.parallel.groups import Ranks
from vapo_megatron.parallel.memory import PeakMemory
from vapo_megatron.parallel.reduce import max_over_world, sum_over_world
from vapo_megatron.rollout.source import OnProgress, RolloutSource
from vapo_megatron.run.metrics import MetricsWriter
from vapo_megatron.run.phase_timer import PhaseTimer, tokens_per_second
from vapo_megatron.run.progress import Progress
from vapo_megatron.run.signs import Signs
from vapo_megatron.run.token_records import gather_token_data, group_records


class RunOutput:
    """Every rank calls the same methods in the same order; only the main rank shows and writes."""

    def __init__(self, config: VapoConfig, ranks: Ranks) -> None:
        """Only measure times until `opened`."""
        self._config, self._ranks = config, ranks
        self._writer: MetricsWriter | None = None
        self._progress = Progress("off", config.algorithm.num_steps, 0)
        self._memory = PeakMemory()
        self._has_warned = False
        self._signs = Signs(config)
        self._timer = PhaseTimer(
            lambda name: self._progress.phase(name), backend.synchronize, self._memory
        )

    @contextlib.contextmanager
    def opened(self, start: int, *, is_unevaluated: bool = False) -> Iterator[None]:
        """Keep the run's files and display open in the body.

        Args:
            start: number of finished steps.
            is_unevaluated: the last step's evaluation was interrupted; rewrite its row.

        Raises:
            UserError: on the main rank; see lock_run and writing.
        """
        algorithm, log = self._config.algorithm, self._config.logging
        run_dir, is_main = Path(log.run_dir), self._ranks.rank == 0
        with contextlib.ExitStack() as stack:
            if is_main:
                with writing(run_dir):
                    stack.enter_context(lock_run(run_dir))
                replace_file(run_dir / "config.yaml", self._config.to_yaml())
                first = start + 1 if start else 0
                writer = MetricsWriter(run_dir, log.tensorboard, first, is_unevaluated, log)
                self._writer = stack.enter_context(writer)
            self._progress = stack.enter_context(
                Progress(
                    log.progress,
                    algorithm.num_steps,
                    algorithm.value_pretraining_steps,
                    title=f"{algorithm_name(self._config.model_dump())} {run_dir}",
                    is_main=is_main,
                    first_step=start + 1,
                    log_path=run_dir / "log.txt",
                )
            )
            if start:
                # Startup and loading the checkpoint do not count towards the first step.
                self._timer.take()
                self._timer.take_spans(start)
                self.note(f"resumed {run_dir} after step {start}")
            yield

    def note(self, text: str) -> None:
        """Print a line."""
        self._progress.note(text)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[OnProgress]:
        """Time and show a phase; yields a callback for (done, total, part of the phase)."""
        with self._timer(name):
            yield lambda done, total, part="": self._progress.phase(
                f"{name} {part}".rstrip(), done, total
            )

    def step(
        self, done: int, metrics: dict[str, float], rollout_spans: Sequence[Span] = ()
    ) -> dict[str, float]:
        """Write a step's row with times and peak memory; num_tokens becomes tokens_per_second.

        Args:
            done: number of the step.
            metrics: of the step.
            rollout_spans: see RolloutSource.

        Returns:
            The times.
        """
        times, peaks = self._timer.take()
        spans = self._timer.take_spans(done)
        row = {name: value for name, value in metrics.items() if name != "num_tokens"}
        if peaks:
            largest = max_over_world(torch.tensor(list(peaks.values()), dtype=torch.float64))
            row |= dict(zip(peaks, largest.tolist(), strict=True))
        highest = torch.tensor(self._memory.highest_bytes(), dtype=torch.float64)
        row["memory/peak_bytes"] = float(sum_over_world(highest))
        if "num_tokens" in metrics:
            row["tokens_per_second"] = tokens_per_second(metrics["num_tokens"], times)
        labels, explanations = self._signs.of(row) if done else ([], [])
        if self._writer is not None:
            self._writer.write_timeline(done, {"trainer": spans, "sampler": rollout_spans})
            self._progress.step(done, self._writer.write(done, row | times), labels)
        for text in explanations:
            self.note(f"step {done}: {text}")
        self._warn_of_rounding(done, row)
        return times

    def _warn_of_rounding(self, step: int, row: Mapping[str, float]) -> None:
        """Print a line, once a run, if a maximum that stops no run is large."""
        config = self._config
        far = far_maximum(row, config.model.dtype, config.rollout.max_logprob_difference)
        # Older weights differ by more than rounding.
        if far and not self._has_warned and not config.rollout.is_stale:
            self._has_warned = True
            self.note(f"step {step}: {far}; docs/metrics.md says what that means")

    def evaluation(self, done: int, correct: Sequence[int]) -> None:
        """Write how many responses to each held-out problem were correct, if there are any."""
        if self._writer is not None and correct:
            problems, sizes = range(len(correct)), [self._config.evaluation.samples] * len(correct)
            self._writer.write_problems(done, problems, correct, sizes, held_out=True)

    def rollouts(
        self,
        step: int,
        scored: Sequence[ScoredRollout],
        summary: StepSummary,
        batch: RolloutBatch,
        entropy: torch.Tensor | None,
        source: RolloutSource,
    ) -> None:
        """Write the step's pass rates and its first groups, whichever ranks sampled these.

        Args:
            step: from 0.
            scored: responses sampled by this rank.
            summary: of all ranks' responses.
            batch: what this data-parallel rank trained on.
            entropy: float32 [T] of the batch, nats; None: not computed.
            source: of the responses.
        """
        decode, groups = source.decode, summary.groups
        positions = (groups < self._config.logging.rollout_groups).nonzero().flatten().tolist()
        shown, tokens = {}, {}
        if positions:
            own = {item.rollout.position: item for item in scored}
            held = source.recorded([own[p] for p in positions if p in own])
            shown = {item.rollout.position: item for item in held}
            if decode is not None:
                tokens = gather_token_data(batch, entropy, positions, summary, self._ranks)
        if self._writer is not None:
            if not summary.is_given:  # Given responses say nothing of what the policy can do.
                problems = summary.prompt_indices[summary.firsts.unique()].tolist()
                correct = groups[summary.is_correct].bincount(minlength=len(problems)).tolist()
                self._writer.write_problems(step + 1, problems, correct, groups.bincount().tolist())
            records = group_records([shown[p] for p in positions], tokens, decode)
            self._writer.write_rollouts(step + 1, records)

"""Names of a run's metrics, and the writer of what a run leaves for people.

Rows are numbered 1..N, one for each training step; row 0 holds the evaluation before training. An
evaluation made after step s stands on row s. A name that a row lacks was not measured in that step
(the actor's in value pretraining); null was measured and was not finite.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vapo_megatron.config.phases import PHASES, TIMED
from vapo_megatron.data.storage import append, replace_file, to_line, writing
from vapo_megatron.run.directory import (
    HELD_OUT_FILE,
    METRICS_FILE,
    PROBLEMS_FILE,
    read_rows,
    rollout_file,
    rollout_steps,
)


@dataclasses.dataclass(frozen=True)
class Metric:
    """Meaning of one name."""

    unit: str
    """Empty for a fraction or another number without a unit."""
    description: str


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("", "Mean shaped reward of the step's responses."),
    "reward/correct_fraction": Metric(
        "", "Responses that the verifier found correct, of those trained on."
    ),
    "reward/unparsable_fraction": Metric("", "Responses without an answer that can be read."),
    "reward/timed_out_fraction": Metric("", "Responses whose verification ran out of time."),
    "rollout/response_length_mean": Metric("tokens", "Mean response length, stop token included."),
    "rollout/response_length_max": Metric("tokens", "Longest response."),
    "rollout/truncated_fraction": Metric("", "Responses ended by a length limit."),
    "rollout/sampling_rounds": Metric("", "Dynamic sampling: rounds that the step took."),
    "rollout/groups_sampled": Metric("", "Groups sampled in all rounds, trained on or not."),
    "rollout/groups_dropped_all_correct": Metric("", "Groups dropped: all responses correct."),
    "rollout/groups_dropped_all_wrong": Metric("", "Groups dropped: no response correct."),
    "rollout/groups_dropped_surplus": Metric("", "Mixed groups dropped: the step had enough."),
    "rollout/groups_filled": Metric(
        "", "Groups trained on though all or no response is correct: the rounds were exhausted."
    ),
    "rollout/sampled_correct_fraction": Metric(
        "", "Responses that the verifier found correct, of all that dynamic sampling sampled."
    ),
    "rollout/logprob_diff_mean": Metric(
        "nat", "Mean |log-probability of the sampler - of the trainer| over response tokens."
    ),
    "rollout/logprob_diff_max": Metric("nat", "The largest of these differences."),
    "rollout/sampler_ratio_mean": Metric(
        "", "Mean probability of a token in the trainer over that in the sampler."
    ),
    "rollout/sampler_corrected_fraction": Metric(
        "", "Tokens that the sampler's correction caps (tis) or drops (icepop)."
    ),
    "actor/loss": Metric("", "Policy loss with its added terms, mean over the step's updates."),
    "actor/policy_loss": Metric("", "Clipped policy loss alone."),
    "actor/positive_lm_loss": Metric(
        "nat",
        "Negative log-likelihood per token of correct responses, before its weight mu; absent "
        "where there are none.",
    ),
    "actor/reference_kl": Metric("nat", "KL from the reference policy, k3, before its weight."),
    "actor/reference_kl_tangent_fraction": Metric(
        "", "Tokens so far from the reference that the KL goes on along its tangent."
    ),
    "actor/entropy": Metric("nat", "Mean entropy of the policy over response tokens."),
    "actor/approx_kl": Metric("nat", "Mean of ratio - 1 - log(ratio): KL from the old policy."),
    "actor/clip_fraction_low": Metric("", "Tokens whose gradient the lower clip removed."),
    "actor/clip_fraction_high": Metric("", "Tokens whose gradient the upper clip removed."),
    "actor/first_ratio_diff_max": Metric(
        "", "Largest |ratio - 1| in the step's first mini-batch, where it should be 0."
    ),
    "actor/grad_norm": Metric("", "Gradient norm before clipping, mean over the step's updates."),
    "actor/skipped_updates": Metric(
        "", "Updates not made: a loss, gradient, value or log-probability was not finite."
    ),
    "actor/learning_rate": Metric("", "Learning rate of the step's last update."),
    "critic/loss": Metric("", "Value loss 0.5 (v - return)^2, mean over the step's updates."),
    "critic/explained_variance": Metric(
        "", "1 - var(return - value) / var(return) before the update: 1 is a perfect critic."
    ),
    "critic/value_mean": Metric("", "Mean value over response tokens, before the update."),
    "critic/return_mean": Metric("", "Mean return over response tokens."),
    "critic/value_clip_fraction": Metric("", "Tokens whose gradient the value clip removed."),
    "critic/grad_norm": Metric("", "Gradient norm before clipping, mean over the step's updates."),
    "critic/skipped_updates": Metric(
        "", "Updates not made: a loss, gradient, value or log-probability was not finite."
    ),
    "critic/learning_rate": Metric("", "Learning rate of the step's last update."),
    "algorithm/lambda_actor_mean": Metric("", "Mean lambda of the actor's advantages."),
    "algorithm/advantage_mean": Metric("", "Mean advantage over response tokens."),
    "algorithm/advantage_std": Metric("", "Standard deviation of the advantages."),
    "sync/received_bytes": Metric(
        "bytes", "Weights that crossed between processes on their way to vLLM, all processes."
    ),
    "tokens_per_second": Metric(
        "tokens/s",
        "Response tokens of the step, all processes, per second; evaluation and checkpoint apart.",
    ),
    "memory/peak_bytes": Metric("bytes", "Peak memory so far, summed over processes."),
    "memory/*_peak_bytes": Metric("bytes", "Peak memory of the fullest GPU in one phase."),
    "evaluation/avg@K": Metric("", "Accuracy on held-out problems, mean of K samples each."),
    "evaluation/pass@K": Metric("", "Held-out problems that any of K samples solves."),
    "evaluation/majority@K": Metric(
        "", "Held-out problems that the most frequent of K answers solves; a tie counts in part."
    ),
    "evaluation/response_length_mean": Metric("tokens", "Mean response length in evaluation."),
    "evaluation/truncated_fraction": Metric("", "Responses that a length limit ended there."),
    "time/*_seconds": Metric("s", "Seconds in one phase of the step, as rank 0 saw it."),
    "time/step_seconds": Metric("s", "The whole step, what lies between the phases included."),
}
"""Every name that a row may hold; K and * stand for a number and one of phases.TIMED."""

_AVG_AT_K = re.compile(r"evaluation/avg@[1-9]\d*")
_AT_K = re.compile(r"evaluation/(avg|pass|majority)@[1-9]\d*")
_PHASE_SECONDS = re.compile(r"time/(\w+)_seconds")
_PHASE_PEAK = re.compile(r"memory/(\w+)_peak_bytes")


def describe(name: str) -> Metric | None:
    """Return the meaning of a name as it stands in a row, None for an unknown one."""
    at_k = _AT_K.fullmatch(name)
    if at_k:
        return METRICS[f"evaluation/{at_k[1]}@K"]
    phase = _PHASE_SECONDS.fullmatch(name)
    if phase and phase[1] in TIMED:
        return Metric("s", f"Seconds in which {PHASES[phase[1]].sentence}.")
    phase = _PHASE_PEAK.fullmatch(name)
    if phase and phase[1] in TIMED:
        happens = PHASES[phase[1]].sentence
        what = f"Peak memory of the fullest process (its GPU's, or resident) while {happens}."
        return Metric("bytes", what)
    return METRICS.get(name)


def accuracy_name(row: Mapping[str, Any]) -> str | None:
    """Return the row's `evaluation/avg@K`, None when no evaluation ran."""
    return next((name for name in row if _AVG_AT_K.fullmatch(name)), None)


class MetricsWriter:
    """Writes what a run leaves for people, TensorBoard's events included, on one process."""

    def __init__(
        self,
        run_dir: str | Path,
        tensorboard: bool = True,
        resume_step: int = 0,
        is_unevaluated: bool = False,
    ):
        """Open the run's files; whatever they hold of steps >= resume_step is dropped.

        Args:
            run_dir: made if missing.
            tensorboard: also write events, to run_dir/tensorboard.
            resume_step: first step that will be written: s + 1 after loading a checkpoint of
                step s, 0 for a run from the beginning.
            is_unevaluated: the row before it is to be written again, with its evaluation.

        Raises:
            DataError: a file of rows holds a line that is none.
            UserError: here and below, a file cannot be written; see storage.writing.
        """
        self.run_dir = Path(run_dir)
        self._events_dir = self.run_dir / "tensorboard"
        first_row = resume_step - is_unevaluated
        self._last_step = first_row - 1
        firsts = {METRICS_FILE: first_row, HELD_OUT_FILE: first_row, PROBLEMS_FILE: resume_step}
        with writing(self.run_dir):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            for name, first in firsts.items():
                file = self.run_dir / name
                if file.exists():
                    kept = [row for row in read_rows(file) if row["step"] < first]
                    replace_file(file, "".join(map(to_line, kept)))
            for step in rollout_steps(self.run_dir):
                if step >= resume_step:
                    rollout_file(self.run_dir, step).unlink()
            self._file = (self.run_dir / METRICS_FILE).open("ab")
            self._events = None
            if tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._events = SummaryWriter(str(self._events_dir), purge_step=first_row)

    def write(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Write one step's row and return it.

        Args:
            step: greater than that of the row before.
            metrics: numbers or 0-d tensors by names of `METRICS`; what is not finite becomes null.
        """
        assert step > self._last_step, f"row {step} after row {self._last_step}"
        unknown = [name for name in metrics if describe(name) is None]
        assert not unknown, f"unknown metrics {unknown}: add them to metrics.METRICS"
        row: dict[str, Any] = {"step": step}
        row |= {name: _finite(value) for name, value in metrics.items()}
        with writing(self.run_dir / METRICS_FILE):
            append(self._file, [row])
        self._last_step = step
        if self._events:
            with writing(self._events_dir):
                for name, value in row.items():
                    if name != "step" and value is not None:
                        self._events.add_scalar(name, value, step)
                self._events.flush()
        return row

    def write_problems(
        self,
        step: int,
        problems: Sequence[int],
        correct: Sequence[int],
        group_size: int,
        *,
        held_out: bool = False,
    ) -> None:
        """Write which problems a step met, and how many of a group's responses were right.

        Args:
            step: of the row.
            problems: `Prompt.index` of each group.
            correct: right responses of each group.
            group_size: responses to each.
            held_out: they are an evaluation's.
        """
        row = {"step": step, "group_size": group_size, "problems": list(problems)}
        path = self.run_dir / (HELD_OUT_FILE if held_out else PROBLEMS_FILE)
        with writing(path), path.open("ab") as file:
            append(file, [row | {"correct": list(correct)}])

    def write_rollouts(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Write a step's groups, each a `group_record`, to rollouts/step_*.jsonl; none: no file."""
        if not groups:
            return
        file = rollout_file(self.run_dir, step)
        with writing(file):
            file.parent.mkdir(exist_ok=True)
        replace_file(file, "".join(map(to_line, groups)))

    def close(self) -> None:
        """Flush and close; may be called twice."""
        with writing(self.run_dir / METRICS_FILE):  # What could not be written is tried again.
            self._file.close()
        if self._events:
            with writing(self._events_dir):
                self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finite(value: Any) -> float | int | None:
    if isinstance(value, bool | int):
        return int(value)
    value = float(value)
    return value if math.isfinite(value) else None

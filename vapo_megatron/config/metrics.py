"""The registry of a run's metrics: every name that a row may hold, its unit and its meaning.

A function that makes metrics declares their names with `emits`, so that one which is not registered
fails on import, before anything is sampled.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from vapo_megatron.config.phases import PHASES, TIMED

_Function = TypeVar("_Function", bound=Callable[..., Any])


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
    "num_tokens": Metric("tokens", "Response tokens of the step; its row has their speed."),
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


def emits(*names: str) -> Callable[[_Function], _Function]:
    """Declare which metrics a function may return, in a dict or in a tuple that holds one.

    Raises:
        KeyError: at once, a name is not registered.
    """
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise KeyError(f"unregistered metrics {unknown}: add them to METRICS in {__name__}")

    def declare(function: _Function) -> _Function:
        @functools.wraps(function)
        def checked(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            parts = result if isinstance(result, tuple) else (result,)
            found = next(part for part in parts if isinstance(part, dict))
            extra = {_registered(name) for name in found} - set(names)
            assert not extra, f"{function.__qualname__} must declare {extra} in @emits"
            return result

        return checked  # type: ignore[return-value]

    return declare


def _registered(name: str) -> str:
    """Return a name as METRICS has it: K for a number of samples."""
    return re.sub(r"@[1-9]\d*$", "@K", name)

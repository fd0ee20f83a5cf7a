"""Registry of a run's metrics: name, unit and description of each.

Functions declare the metrics they return with `emits`, so that an unregistered name fails on
import rather than after the first rollout.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from vapo_megatron.config.phases import PHASES, TIMED

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Metric:
    """Unit and description of a metric."""

    unit: str
    """Empty for dimensionless numbers."""
    description: str


LABEL = r"[\w.:-]+"
"""Regular expression of the names, of verifiers and of data sources, that metrics go by."""
_JUDGED = {"verifier": "that this verifier judged", "source": "to this data source's problems"}
KINDS = tuple(_JUDGED)
"""What metrics are broken down by."""


def _by(kind: str) -> dict[str, Metric]:
    """Return the metrics that a run has for each name of a kind, where it has more than one."""
    judged = _JUDGED[kind]
    return {
        f"reward/by_{kind}/NAME/accuracy": Metric("", f"Fraction correct of responses {judged}."),
        f"reward/by_{kind}/NAME/reward_mean": Metric("", f"Mean reward of responses {judged}."),
        f"reward/by_{kind}/NAME/response_length_mean": Metric(
            "tokens", f"Mean length of responses {judged}."
        ),
        f"reward/by_{kind}/NAME/failed_fraction": Metric(
            "", f"Fraction of responses {judged} whose verification failed or timed out."
        ),
        f"reward/by_{kind}/NAME/share": Metric("", f"Share of the step's responses {judged}."),
        f"critic/by_{kind}/NAME/explained_variance": Metric(
            "", f"As critic/explained_variance, of responses {judged}."
        ),
        f"critic/by_{kind}/NAME/value_error_mean": Metric(
            "", f"As critic/value_error_mean, of responses {judged}."
        ),
        f"evaluation/by_{kind}/NAME/avg@K": Metric(
            "", f"As avg@K, of held-out responses {judged}."
        ),
        f"evaluation/by_{kind}/NAME/reward_mean": Metric(
            "", f"As evaluation/reward_mean, of held-out responses {judged}."
        ),
        f"evaluation/by_{kind}/NAME/response_length_mean": Metric(
            "tokens", f"Mean length of held-out responses {judged}."
        ),
    }


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("", "Mean shaped reward of the step's responses."),
    "reward/std": Metric("", "Standard deviation of the step's rewards; 0: all are equal."),
    "reward/group_std_mean": Metric(
        "", "Standard deviation of the rewards within a group, mean over the step's groups."
    ),
    "reward/equal_groups_fraction": Metric(
        "",
        "Fraction of groups whose rewards are all equal; without a critic nothing is learned from "
        "them.",
    ),
    "reward/unused_score_fraction": Metric(
        "",
        "Without reward.from_score: fraction of responses whose verdict has a score other than 1 "
        "if correct and 0 if not, which the reward does not show; absent if no verdict has one.",
    ),
    "reward/correct_fraction": Metric(
        "", "Fraction of correct responses among those trained on, by the verifier."
    ),
    "reward/unparsable_fraction": Metric("", "Fraction of responses without a parsable answer."),
    "reward/timed_out_fraction": Metric("", "Fraction of responses whose verification timed out."),
    "reward/failed_fraction": Metric(
        "",
        "Fraction of responses that the verifier failed to judge; see reward.max_failed_fraction.",
    ),
    "reward/own/NAME": Metric("", "Mean of a number that the verifier's verdicts name."),
    **_by("verifier"),
    **_by("source"),
    "rollout/response_length_mean": Metric("tokens", "Mean response length, stop token included."),
    "rollout/response_length_max": Metric("tokens", "Longest response."),
    "rollout/truncated_fraction": Metric("", "Fraction truncated by a length limit."),
    "rollout/turns_mean": Metric("", "With an environment: actions of an episode."),
    "rollout/observation_tokens_mean": Metric(
        "tokens", "With an environment: tokens of an episode's observations, template included."
    ),
    "rollout/turn_reward_mean": Metric(
        "", "With an environment: mean reward of a turn, without the verdict's."
    ),
    "rollout/environment_failed_fraction": Metric(
        "", "Fraction of episodes that ended because the environment failed."
    ),
    "rollout/failed_calls_mean": Metric(
        "", "With an environment: an episode's calls of tools that were wrong."
    ),
    "rollout/cut_by_turns_fraction": Metric(
        "", "Fraction of episodes that environment.max_turns cut."
    ),
    "rollout/cut_by_action_fraction": Metric(
        "", "Fraction of episodes that environment.max_action_tokens cut."
    ),
    "rollout/sampling_rounds": Metric("", "Dynamic sampling: sampling rounds of the step."),
    "rollout/groups_sampled": Metric("", "Groups sampled in all rounds, kept or dropped."),
    "rollout/groups_dropped_all_correct": Metric("", "Groups dropped: all responses correct."),
    "rollout/groups_dropped_all_wrong": Metric(
        "",
        "Groups dropped: no response correct; with reward.from_score all others whose rewards are "
        "equal.",
    ),
    "rollout/groups_dropped_surplus": Metric("", "Mixed groups dropped: the batch was full."),
    "rollout/groups_filled": Metric(
        "", "Uniform groups trained on after all, because the sampling rounds were exhausted."
    ),
    "rollout/sampled_correct_fraction": Metric(
        "", "Fraction of correct responses among all that dynamic sampling sampled."
    ),
    "rollout/logprob_diff_mean": Metric(
        "nat", "Mean |log-probability in vLLM - in the trainer| over response tokens."
    ),
    "rollout/other_routes_fraction": Metric(
        "",
        "With algorithm.router_replay=r3: share of (token, layer) for which the trainer's router, "
        "before the updates, would choose other experts than vLLM did.",
    ),
    "rollout/logprob_diff_own_routes_mean": Metric(
        "nat",
        "As rollout/logprob_diff_mean, with the experts that the trainer's routers choose; see "
        "rollout.compare_routes_every.",
    ),
    "rollout/logprob_diff_high_fraction": Metric(
        "",
        "Fraction of response tokens that differ by more than rollout.max_logprob_difference; the "
        "run stops above 0.01.",
    ),
    "rollout/logprob_diff_max": Metric("nat", "Largest such difference; reported only."),
    "rollout/sampler_ratio_mean": Metric(
        "", "Mean ratio of a token's probabilities in the trainer and in vLLM."
    ),
    "rollout/sampler_corrected_fraction": Metric(
        "", "Fraction of tokens that sampler_correction caps (tis) or drops (icepop)."
    ),
    "rollout/lag_mean": Metric(
        "versions",
        "With rollout.lag or carry_over_groups: how much older the policy was that sampled, mean "
        "over response tokens.",
    ),
    "rollout/lag_max": Metric("versions", "The same, largest."),
    "rollout/lag_share@K": Metric(
        "", "The same: share of response tokens that are K versions older; rest: 0."
    ),
    "rollout/effective_sample_fraction": Metric(
        "",
        "Where older weights sample: (sum r)^2 / (n sum r^2) of n tokens, r the ratio of their "
        "probabilities in the trainer and in vLLM; 1: not stale.",
    ),
    "actor/loss": Metric("", "Policy loss plus auxiliary losses, mean over the step's updates."),
    "actor/policy_loss": Metric("", "Policy loss, see algorithm.policy_loss."),
    "actor/positive_lm_loss": Metric(
        "nat",
        "Negative log-likelihood per token of correct responses, before the weight mu; absent if "
        "there are none.",
    ),
    "actor/reference_kl": Metric("nat", "KL to the reference policy (k3), before its weight."),
    "actor/reference_kl_tangent_fraction": Metric(
        "", "Fraction of tokens so far from the reference that their KL is linearised."
    ),
    "actor/entropy": Metric("nat", "Mean entropy of the policy over response tokens."),
    "actor/approx_kl": Metric(
        "nat",
        "Mean of ratio - 1 - log(ratio): KL to the old policy (dis, dppo_tv: the engine).",
    ),
    "actor/clip_fraction_low": Metric(
        "", "Fraction of tokens with no gradient: lower clip; with dis and dppo_tv: dropped."
    ),
    "actor/clip_fraction_high": Metric(
        "", "Fraction of tokens with no gradient: upper clip; with dis and dppo_tv: dropped."
    ),
    "actor/first_ratio_diff_mean": Metric(
        "", "Mean |ratio - 1| in the step's first mini-batch; the run stops if it is not rounding."
    ),
    "actor/first_ratio_diff_high_fraction": Metric(
        "",
        "Fraction of the first mini-batch's tokens with |ratio - 1| above 1e-4 (float32) or 0.2 "
        "(bfloat16); the run stops above 0.01.",
    ),
    "actor/first_ratio_diff_max": Metric(
        "", "Largest |ratio - 1| in the step's first mini-batch; reported only."
    ),
    "actor/grad_norm": Metric("", "Gradient norm before clipping, mean over the step's updates."),
    "actor/other_routes_fraction": Metric(
        "",
        "With router replay: share of (token, layer) for which the router as it is now, before "
        "each update, would choose other experts.",
    ),
    "actor/skipped_updates": Metric(
        "", "Updates not made: a loss, gradient, value or log-probability was not finite."
    ),
    "actor/learning_rate": Metric("", "Learning rate of the step's last update."),
    "critic/loss": Metric("", "Value loss 0.5 (v - return)^2, mean over the step's updates."),
    "critic/explained_variance": Metric(
        "", "1 - var(return - value) / var(return) before the update; 1: perfect critic."
    ),
    "critic/value_error_mean": Metric(
        "",
        "Mean of value - return over trained tokens, before the update; explained variance does "
        "not see it.",
    ),
    "critic/return_std": Metric(
        "", "Standard deviation of the returns over trained tokens, before the update."
    ),
    "critic/value_mean": Metric("", "Mean value over response tokens, before the update."),
    "critic/return_mean": Metric("", "Mean return over response tokens."),
    "critic/value_clip_fraction": Metric("", "Fraction of tokens with no gradient: value clip."),
    "critic/grad_norm": Metric("", "Gradient norm before clipping, mean over the step's updates."),
    "critic/skipped_updates": Metric(
        "", "Updates not made: a loss, gradient, value or log-probability was not finite."
    ),
    "critic/learning_rate": Metric("", "Learning rate of the step's last update."),
    "algorithm/lambda_actor_mean": Metric("", "Mean lambda of the actor's advantages."),
    "algorithm/advantage_mean": Metric("", "Mean advantage over response tokens."),
    "algorithm/advantage_std": Metric("", "Standard deviation of the advantages."),
    "sync/received_bytes": Metric(
        "bytes", "Weights sent between ranks in the weight sync, summed over ranks."
    ),
    "num_tokens": Metric("tokens", "Response tokens of the step."),
    "tokens_per_second": Metric(
        "tokens/s",
        "Response tokens of the step per second, all ranks, without evaluation and checkpoint.",
    ),
    "memory/peak_bytes": Metric("bytes", "Peak memory so far, summed over ranks."),
    "memory/*_peak_bytes": Metric(
        "bytes", "Peak memory in one phase, on the rank with the highest peak."
    ),
    "evaluation/avg@K": Metric("", "Accuracy on held-out problems, mean of K samples each."),
    "evaluation/pass@K": Metric("", "Fraction of held-out problems solved by any of K samples."),
    "evaluation/majority@K": Metric(
        "",
        "Fraction of held-out problems solved by majority vote; ties count in part. Missing where "
        "verdicts of correct responses name no answer.",
    ),
    "evaluation/reward_mean": Metric(
        "",
        "With reward.from_score: mean reward in evaluation, without a punishment of length.",
    ),
    "evaluation/response_length_mean": Metric("tokens", "Mean response length in evaluation."),
    "evaluation/nll_mean": Metric(
        "nat",
        "With data.response_column: the loss on the held-out responses, the sum of -log p over all "
        "their tokens, stop tokens included, divided by nll_tokens; at rollout.temperature.",
    ),
    "evaluation/nll_tokens": Metric("tokens", "Tokens of the held-out responses together."),
    "evaluation/truncated_fraction": Metric("", "Fraction of responses truncated in evaluation."),
    "time/*_seconds": Metric("s", "Time in one phase of the step, on rank 0."),
    "time/step_seconds": Metric("s", "Time of the whole step."),
    "time/environment_seconds": Metric(
        "s", "Time that an episode's calls of its environment took, mean over episodes."
    ),
    "time/environment_waiting_seconds": Metric(
        "s",
        "Time of the generation in which an engine sampled nothing and waited for its environment, "
        "the longest of all engines.",
    ),
    "time/trainer_idle_seconds": Metric(
        "s", "Disaggregated: time that the trainers waited for the step's responses."
    ),
    "time/sampler_idle_seconds": Metric(
        "s",
        "Disaggregated: idle time of the first rollout worker since the latest step.",
    ),
}
"""Every metric; K stands for a number, * for one of phases.TIMED, NAME for a LABEL."""

_AVG_AT_K = re.compile(r"evaluation/avg@[1-9]\d*")
_NAMED = re.compile(
    rf"(?P<group>\w+)/by_(?P<kind>{'|'.join(KINDS)})/(?P<label>{LABEL})/(?P<what>.+)"
)
_OWN = re.compile(rf"reward/own/{LABEL}")
_PHASE_SECONDS = re.compile(r"time/(\w+)_seconds")
_PHASE_PEAK = re.compile(r"memory/(\w+)_peak_bytes")


def describe(name: str) -> Metric | None:
    """Return the description of a concrete name, such as `avg@32`; None if it is unknown."""
    phase = _PHASE_SECONDS.fullmatch(name)
    if phase and phase[1] in TIMED:
        return Metric("s", f"Time of this phase: {PHASES[phase[1]].sentence}.")
    phase = _PHASE_PEAK.fullmatch(name)
    if phase and phase[1] in TIMED:
        happens = PHASES[phase[1]].sentence
        what = f"Highest peak memory of a rank (GPU, or resident) in this phase: {happens}."
        return Metric("bytes", what)
    return METRICS.get(_registered(name))


class Named(NamedTuple):
    """The parts of a metric's name that goes by verifier or source."""

    group: str
    """reward, critic or evaluation."""
    kind: str
    """One of KINDS."""
    label: str
    """The verifier or the source."""
    what: str
    """Such as accuracy."""


def metric_by(group: str, kind: str, label: str, what: str) -> str:
    """Return the name of a metric that goes by verifier or source; see Named."""
    assert re.fullmatch(LABEL, label), f"{label!r} was checked to match {LABEL}"
    return f"{group}/by_{kind}/{label}/{what}"


def own_metric(name: str) -> str:
    """Return the name of a verifier's own metric."""
    assert re.fullmatch(LABEL, name), f"{name!r} was checked to match {LABEL}"
    return f"reward/own/{name}"


def named(name: str) -> Named | None:
    """Take the name of a metric that goes by verifier or source apart; None: it is another."""
    match = _NAMED.fullmatch(name)
    return None if match is None else Named(**match.groupdict())


def accuracy_name(row: Mapping[str, Any]) -> str | None:
    """Return the name of the row's `evaluation/avg@K`, None without an evaluation."""
    return next((name for name in row if _AVG_AT_K.fullmatch(name)), None)


def emits(*names: str) -> Callable[[_Function], _Function]:
    """Declare the metrics that a function may return, as a dict or in a tuple with a dict.

    Raises:
        KeyError: at import, for an unregistered name.
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
    """Return the key in METRICS: with K for the number of samples, and NAME for a label."""
    if _OWN.fullmatch(name):
        return own_metric("NAME")
    found = named(name)
    if found is not None:
        name = metric_by(found.group, found.kind, "NAME", found.what)
    return re.sub(r"@[1-9]\d*$", "@K", name)

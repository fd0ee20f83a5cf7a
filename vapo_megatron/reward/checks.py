"""What stops a run: problems that no verifier can judge, and verdicts that fail."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from vapo_megatron.config import RewardConfig, RolloutConfig
from vapo_megatron.data.batch import StepSummary
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.data.rollout import STATUSES, Prompt, ScoredRollout
from vapo_megatron.errors import ConfigError, UserError, tell
from vapo_megatron.parallel.reduce import any_rank, gather_objects
from vapo_megatron.reward.reward_model import check_reward_model_judges, reward_model_refusals
from vapo_megatron.reward.usable import settle
from vapo_megatron.reward.verifier import RunningVerifier
from vapo_megatron.reward.verifiers import Verifiers


class VerdictsFailed(UserError):
    """Too many of a step's verdicts failed or timed out."""


FAILED = ("failed", "timed_out")
"""Statuses that are no judgement."""
_ROWS_AT_ONCE = 1000
"""Between two calls of what shows progress."""


def examine(
    verifiers: Verifiers,
    dataset: PromptDataset,
    indices: Sequence[int],
    refusal: str | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[int, str], dict[int, str]]:
    """Ask the verifiers which of some problems they can judge.

    Args:
        verifiers: of the run.
        dataset: of the problems.
        indices: theirs.
        refusal: why the reward model judges none of them; None: it does.
        on_progress: called with (done, all) of them.

    Returns:
        Index -> name of the verifier that hybrid chose, and index -> why it cannot be judged.
    """
    chosen, bad = dict[int, str](), dict[int, str]()
    for start in range(0, len(indices), _ROWS_AT_ONCE):
        on_progress(start, len(indices))
        some = indices[start : start + _ROWS_AT_ONCE]
        names, reasons = verifiers.examine([dataset.rows[i] for i in some], refusal)
        chosen |= {some[i]: name for i, name in names.items()}
        bad |= {some[i]: reason for i, reason in reasons.items()}
    on_progress(len(indices), len(indices))
    return chosen, bad


def start_verifiers(
    reward: RewardConfig,
    training: PromptDataset | None,
    held_out: PromptDataset | None,
    tp_size: int,
    default: object | None = None,
    *,
    reward_hf_path: str | None = None,
    skip_unusable: bool = False,
) -> Verifiers | None:
    """Start the verifiers, and refuse problems that they cannot judge. Collective.

    Afterwards, on every rank, problems of `hybrid` name the verifier it chose, and unusable ones
    are skipped.

    Args:
        reward: the verifiers and their settings.
        training, held_out: each replica checks its share of both.
        tp_size: ranks of a vLLM replica.
        default: see Verifiers.
        reward_hf_path: of the reward model, which may judge the training data; None: none.
        skip_unusable: of data: leave such problems out and print how many.

    Returns:
        On the first rank of each replica the verifiers, to be closed; None elsewhere.

    Raises:
        UserError: on every rank: a verifier does not load, or does not judge a made-up response;
            the reward model would judge nothing; or names the last such row of a file.
    """
    replica, rank_in_replica = divmod(dist.get_rank(), tp_size)
    verifiers = None
    if rank_in_replica == 0:
        verifiers = Verifiers(reward, default)
        verifiers.start()

    refusals = reward_model_refusals(has_reward_model=reward_hf_path is not None)
    for dataset, refusal in zip((training, held_out), refusals, strict=True):
        if dataset is None:
            continue
        share = range(replica, len(dataset), dist.get_world_size() // tp_size)
        mistake, bad, chosen = "", dict[int, str](), dict[int, str]()
        if verifiers is not None:
            try:
                chosen, bad = examine(verifiers, dataset, share, refusal)
            except UserError as error:
                mistake = str(error)
        # An error must be raised on every rank, or the others wait for this one forever.
        gathered = gather_objects((mistake, bad, chosen))
        if any(mistake for mistake, _, _ in gathered):
            raise ConfigError(max(mistake for mistake, _, _ in gathered))
        for _, found, chosen in gathered:
            dataset.assign(chosen)
            bad |= found
        lines = settle(dataset, bad, reward, skip=skip_unusable, has_default=default is not None)
        if dist.get_rank() == 0:
            for line in lines:
                tell(f"warning: {line}")

    if mistake := max(gather_objects(_trial(verifiers, training, held_out))):
        raise ConfigError(mistake)
    if training is not None and default is None:
        rows = [row for _, row in training.kept]
        check_reward_model_judges(reward, rows, training.path, reward_hf_path)
    return verifiers


def _trial(verifiers: Verifiers | None, *datasets: PromptDataset | None) -> str:
    """Try this rank's verifiers out; return what is wrong, or nothing."""
    if verifiers is None:
        return ""
    rows = (d.rows for d in datasets if d is not None)
    try:
        verifiers.try_out(itertools.chain.from_iterable(rows))
    except UserError as error:
        return str(error)
    return ""


def any_sees_groups(verifiers: RunningVerifier | None, rollout: RolloutConfig) -> bool:
    """Return whether any rank's verifiers see groups. Collective; raises as check_whole_groups."""
    sees_groups = any_rank(isinstance(verifiers, Verifiers) and verifiers.sees_groups())
    check_whole_groups(rollout, sees_groups=sees_groups)
    return sees_groups


def check_whole_groups(rollout: RolloutConfig, *, sees_groups: bool) -> None:
    """Refuse a verifier that sees groups where their responses end in different steps.

    Raises:
        ConfigError: names rollout.carry_over_groups.
    """
    if sees_groups and rollout.carry_over_groups:
        raise ConfigError(
            f"rollout.carry_over_groups={rollout.carry_over_groups} ends the responses of a group "
            "in different steps, but a verifier sees whole groups; set it to 0, or judge responses "
            "one by one"
        )


def check_verdicts(
    summary: StepSummary,
    reward: RewardConfig,
    scored: Sequence[ScoredRollout],
    prompts: PromptDataset | None,
    group: ProcessGroup | None = None,
) -> None:
    """Stop a run whose verifier does not work; the same on every rank.

    Args:
        summary: of all ranks' responses; no verdict may be pending.
        reward: the limits.
        scored: this rank's responses.
        prompts: what the responses' prompts are of; None: not known.
        group: of all ranks that have responses; None: the world.

    Raises:
        VerdictsFailed: more of the step's verdicts failed or timed out than
            reward.max_failed_fraction allows. Quotes the first.
    """
    assert not summary.is_pending.any(), "the reward model has scored what it judges"
    counts = summary.statuses.bincount(minlength=len(STATUSES)).tolist()
    by_status = dict(zip(STATUSES, counts))
    if not _are_too_many(by_status, reward):
        return
    failed = ((s.rollout.position, s) for s in scored if s.status in FAILED)
    position, own = min(failed, key=lambda found: found[0], default=(math.inf, None))
    said = "" if own is None else failure(own.rollout.prompt, own.status, own.note, reward, prompts)
    check_failures(by_status, reward, min(gather_objects((position, said), group))[1])


def place(dataset: PromptDataset | None, index: int) -> str:
    """Say which row of which file a Prompt.index is; None: the file is not known."""
    if dataset is None:
        return f"problem {index}"
    path, row = dataset.row(index)
    return f"row {row} (from 0) of {path}"


def failure(
    prompt: Prompt, status: str, note: str, reward: RewardConfig, prompts: PromptDataset | None
) -> str:
    """Say which verifier failed on which row of which file, and how."""
    verifier = prompt.problem.verifier or reward.verifier
    what = note or status.replace("_", " ")
    return f"the verifier {verifier} on {place(prompts, prompt.index)}: {what}"


def check_failures(counts: Mapping[str, int], reward: RewardConfig, first: str) -> None:
    """Refuse verdicts of a verifier that does not work; counts: of each status, first: see failure.

    Raises:
        VerdictsFailed: see check_verdicts.
    """
    if _are_too_many(counts, reward):
        failed, timed_out = (counts[status] for status in FAILED)
        raise VerdictsFailed(
            f"{failed} verdicts failed and {timed_out} timed out, of {sum(counts.values())}: more "
            f"than reward.max_failed_fraction={reward.max_failed_fraction:g} allows; the first: "
            f"{first}; correct the verifier, or raise reward.timeout_seconds="
            f"{reward.timeout_seconds:g}, reward.memory_gb={reward.memory_gb:g} or the fraction"
        )


def _are_too_many(counts: Mapping[str, int], reward: RewardConfig) -> bool:
    return sum(counts[s] for s in FAILED) > reward.max_failed_fraction * sum(counts.values())

"""Checks before the start: that the verifiers work, and can judge the problems."""

from __future__ import annotations

from vapo_megatron.cli.command import ProgressBar
from vapo_megatron.config import VapoConfig
from vapo_megatron.data.labels import count_rows, labels_of
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.reward.checks import check_whole_groups, examine
from vapo_megatron.reward.reward_model import check_reward_model_judges, reward_model_refusals
from vapo_megatron.reward.usable import settle
from vapo_megatron.reward.verifiers import Verifiers, default_name
from vapo_megatron.rollout.inputs import Inputs

_FIRST_ANSWERS = 200
"""Ground truths of each file that a launch reads: enough to find that none can be judged."""


def check_answers(config: VapoConfig, inputs: Inputs, *, all_answers: bool = True) -> list[str]:
    """Refuse problems that their verifier cannot judge; a run's ranks share this work.

    Args:
        config: valid by itself.
        inputs: their rows get the verifier that hybrid chose, if all are looked at.
        all_answers: integers take no time, other ground truths some milliseconds each; False: only
            a file's first rows.

    Returns:
        How many rows of each file each verifier judges, and usable.py's warnings; empty unless
        all_answers.

    Raises:
        ConfigError: a verifier does not load or judge, or the reward model would judge nothing.
        DataError: names the last such row of a file.
    """
    counts: list[str] = []
    refusals = reward_model_refusals(has_reward_model=config.model.reward_hf_path is not None)
    given = {"data": inputs.dataset, "evaluation": inputs.held_out}
    with Verifiers(config.reward) as verifiers:
        _try_out(verifiers, config, inputs)
        for (section, dataset), refusal in zip(given.items(), refusals, strict=True):
            if dataset is not None:
                counts += _check_rows(
                    verifiers, dataset, config, section, refusal, all_answers=all_answers
                )
    if all_answers and (dataset := inputs.dataset) is not None:
        path, kept = config.model.reward_hf_path, [row for _, row in dataset.kept]
        check_reward_model_judges(config.reward, kept, dataset.path, path)
    return counts


def _try_out(verifiers: Verifiers, config: VapoConfig, inputs: Inputs) -> None:
    verifiers.load()
    datasets = (d for d in (inputs.dataset, inputs.held_out) if d is not None)
    verifiers.try_out(row for dataset in datasets for row in dataset.rows)
    check_whole_groups(config.rollout, sees_groups=verifiers.sees_groups())


def _check_rows(
    verifiers: Verifiers,
    dataset: PromptDataset,
    config: VapoConfig,
    section: str,
    refusal: str | None,
    *,
    all_answers: bool,
) -> list[str]:
    """Check the rows of one section's files; see check_answers."""
    rows = range(len(dataset.rows))
    with ProgressBar("ground truths") as bar:
        # The ranks check all rows later, in shares; a few rows catch a wrong column now.
        looked_at = rows if all_answers else rows[:_FIRST_ANSWERS]
        chosen, bad = examine(verifiers, dataset, looked_at, refusal, bar.show)
    skips = config.data.skip_unusable
    if not all_answers:
        if not skips:
            settle(dataset, bad, config.reward, skip=False)
        return []
    dataset.assign(chosen)
    warnings = settle(dataset, bad, config.reward, skip=skips)
    labels = labels_of(dataset.kept, default_name(config.reward))
    counts = count_rows(labels, dataset.path, section)
    return counts + [f"warning: {line}" for line in warnings]

"""What becomes of rows that their verifier cannot judge, or judges by something else than meant."""

from __future__ import annotations

import re
from collections.abc import Mapping

from vapo_megatron.config import RewardConfig
from vapo_megatron.data.prompts import PromptDataset
from vapo_megatron.errors import DataError
from vapo_megatron.reward.extraction import plain_integer
from vapo_megatron.reward.hybrid import is_prose

_CHOICE = re.compile(r"(\\text\{)?\(?[A-J]\)?\}?[.)]?")
"""The letter of a choice, such as A, (B) and C."""


def settle(
    dataset: PromptDataset,
    unusable: Mapping[int, str],
    reward: RewardConfig,
    *,
    skip: bool,
    has_default: bool = False,
) -> list[str]:
    """Refuse a data set's unusable rows, or leave them out.

    Args:
        dataset: its rows name their verifiers.
        unusable: index -> what is wrong, as Verifiers.examine returns it.
        reward: the verifiers' settings.
        skip: data.skip_unusable.
        has_default: a verifier's instance or class takes the place of reward.verifier.

    Returns:
        Warnings: how many rows are left out, how many ground truths are prose that `math` judges,
            each with one of them, and that nobody chose `math` for letters of choices.

    Raises:
        DataError: names the last unusable row, or nothing is left.
    """
    if unusable and not skip:
        row = max(unusable)
        path, number = dataset.row(row)
        raise DataError(
            f"{path}: row {number} (from 0) {unusable[row]}; correct or remove the row, or set "
            "data.skip_unusable=true"
        )

    dataset.leave_out(unusable)
    lines = []
    left_out = dataset.left_out
    if left_out:
        path, number = dataset.row(min(left_out))
        lines.append(
            f"{len(left_out)} of {len(dataset)} rows of {dataset.path} are left out "
            f"(data.skip_unusable=true), such as {path}, row {number} (from 0), which "
            f"{left_out[min(left_out)]}"
        )

    # Prose is legal, but `math` compares it letter by letter.
    prose = prose_rows(dataset, reward, has_default=has_default)
    if prose:
        path, number = dataset.row(prose[0])
        lines.append(
            f"{len(prose)} of {len(dataset)} ground truths of {dataset.path} are prose, but math "
            f"judges them, such as {path}, row {number} (from 0): "
            f"{dataset.rows[prose[0]].answer!r:.80}; math compares words letter by letter: let "
            "exact or a judge judge them with a column `verifier`, or reward.verifier=hybrid"
        )
    if not has_default and "verifier" not in reward.model_fields_set:
        lines += _letters(dataset)
    return lines


def _letters(dataset: PromptDataset) -> list[str]:
    """Return a warning if most rows that name no verifier have a choice's letter."""
    answers = [problem.answer for _, problem in dataset.kept if problem.verifier is None]
    letters = [answer for answer in answers if _CHOICE.fullmatch(answer)]
    if 2 * len(letters) <= len(answers):
        return []
    return [
        f"{len(letters)} of {len(answers)} ground truths of {dataset.path} are letters, such as "
        f"{letters[0]!r}, and reward.verifier is not set, so math judges them; set "
        "reward.verifier=exact reward.verifiers.exact.kind=choice, or reward.verifier=math if that "
        "is right"
    ]


def prose_rows(
    dataset: PromptDataset, reward: RewardConfig, *, has_default: bool = False
) -> list[int]:
    """Return the indices of rows that `math` judges though their ground truths are prose."""
    known: dict[str, bool] = {}
    found = []
    for i, problem in dataset.kept:
        name = problem.verifier or (None if has_default else reward.verifier)
        if name is None or reward.use_of(name) != "math":
            continue
        answer = problem.answer
        if answer not in known:
            known[answer] = plain_integer(answer) is None and is_prose(answer)
        if known[answer]:
            found.append(i)
    return found

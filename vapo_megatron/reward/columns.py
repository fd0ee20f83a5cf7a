"""Which columns of a row its verifier reads, beside prompt and ground truth.

Verdicts do not depend on other columns, so samples and verdicts stay valid when those change.
"""

from __future__ import annotations

import string
from typing import Any

from vapo_megatron.config import RewardConfig
from vapo_megatron.config.reward import HYBRID, REWARD_MODEL
from vapo_megatron.data.problems import Problem
from vapo_megatron.reward import code_tests
from vapo_megatron.reward.judge import Judge, Pairwise

_OF_BUILT_IN = {
    "math": (),
    "exact": ("kind", "schema"),
    "code": (*code_tests.COLUMNS, *code_tests.FUNCTION_COLUMNS, *code_tests.SETUP_COLUMNS,
             *code_tests.CODE_COLUMNS, "metadata"),
    "reasoning_gym": ("reasoning_gym",),
    REWARD_MODEL: (),
}  # fmt: skip
_JUDGES: dict[Any, type[Judge]] = {"judge": Judge, "pairwise": Pairwise}


def columns_read(problem: Problem, reward: RewardConfig) -> set[str]:
    """Return the columns of a problem that judging may read.

    A verifier of one's own, or a judge with its template in a file, may read all.
    """
    name = problem.verifier or reward.verifier
    names = reward.hybrid if name == HYBRID else [name]
    found = [_columns(name, reward) for name in names]
    if None in found:
        return set(problem.metadata)
    return problem.metadata.keys() & {"verifier"}.union(*filter(None, found))


def _columns(name: str, reward: RewardConfig) -> set[str] | None:
    """Return the columns that a verifier reads; None: it may read any."""
    use = reward.use_of(name)
    if use in _OF_BUILT_IN:
        return set(_OF_BUILT_IN[use])
    if use not in _JUDGES:
        return None
    options = reward.verifiers.get(name, {})
    template = options.get("template", _JUDGES[use].template)
    if not isinstance(template, str) or "{" not in template:
        return None
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(template) if field}
    except ValueError:
        return None
    return fields | {str(options.get("reference_column"))}

"""Calls a user's verifier once, before a run, on a response that is made up.

So that one which raises, or returns something else than verdicts, ends the run before it starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vapo_megatron.config import RewardConfig
from vapo_megatron.config.reward import BUILT_IN_VERIFIERS, HYBRID
from vapo_megatron.data.problems import Problem
from vapo_megatron.reward.isolated import IsolatedVerifier
from vapo_megatron.reward.shaping import scored_verdict

_RESPONSES = (
    "This response was made up to try the verifier out, and is \\boxed{{{answer}}}.\n"
    "Answer: {answer}",
    "I do not know.",
)
"""Where a verifier sees groups it is given both, else the first."""
_MOST_ROWS = 100
"""How many rows are looked at for one that a verifier's `check` accepts."""


def rows_to_try(
    rows: Iterable[Problem], reward: RewardConfig, *, default_is_given: bool
) -> dict[str | None, list[Problem]]:
    """Return, for each verifier of the user's own, the first rows that it judges.

    Under hybrid, which has not chosen yet, those that it may judge. A name that no verifier has is
    left to others to refuse. The default that is given in Python goes by None.
    """
    found: dict[str | None, list[Problem]] = {}
    for row in rows:
        if row.verifier is None and default_is_given:
            found.setdefault(None, []).append(row)
            continue
        name = row.verifier or reward.verifier
        for each in reward.hybrid if name == HYBRID else [name]:
            is_known = each == reward.verifier or each in reward.verifiers
            if is_known and reward.use_of(each) not in (*BUILT_IN_VERIFIERS, HYBRID):
                found.setdefault(each, []).append(row)
    return {name: some[:_MOST_ROWS] for name, some in found.items()}


def failed_trial(
    verifier: IsolatedVerifier, rows: Sequence[Problem], reward: RewardConfig, name: str
) -> str | None:
    """Return what is wrong with the verdict on a made-up response; None: nothing.

    Args:
        verifier: a user's.
        rows: of which the first that it can judge is taken; where it can judge none, it is not
            called.
        reward: has the range of scores.
        name: the verifier's, for reward.scales.
    """
    refused = verifier.unusable(rows)
    problem = next((row for i, row in enumerate(rows) if i not in refused), None)
    if problem is None:
        return None
    texts = [text.format(answer=problem.answer) for text in _RESPONSES]
    found = verifier.try_out(texts if verifier.sees_group else texts[:1], problem)
    if isinstance(found, str):
        return found
    for given in found:
        verdict = scored_verdict(given, reward, name)
        if verdict.status == "failed" != given.status:
            return f"returned a verdict that fails: {verdict.note}"
    return None

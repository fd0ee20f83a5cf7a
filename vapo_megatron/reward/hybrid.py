"""Chooses who judges a row whose verifier is `hybrid`: the first of reward.hybrid that accepts it.

So what can be checked is checked, what has only a reference is left to a judge, and a reward model
scores the rest, as in arXiv 2503.22230. The choice is made once, before a run, and written into the
rows; from then on they name their verifier like any others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from vapo_megatron.config import RewardConfig
from vapo_megatron.config.reward import HYBRID
from vapo_megatron.data.problems import Problem
from vapo_megatron.reward.extraction import ground_truth

Unusable = Callable[[str, Sequence[Problem]], dict[int, str]]
"""A verifier's name and problems -> index -> why it cannot judge the problem."""

_COMMAND = re.compile(r"\\(?:text|mathrm|mbox|operatorname)\s*\{(?P<text>[^{}]*)\}|\\[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]{3,}")
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log exp sqrt min max gcd lcm mod "
    "det inf infinity".split()
)  # fmt: skip


def choose(
    problems: Sequence[Problem], reward: RewardConfig, unusable: Unusable
) -> tuple[dict[int, str], dict[int, str]]:
    """Choose a verifier for each problem.

    Args:
        problems: all of which hybrid judges.
        reward: its `hybrid` names the verifiers in order.
        unusable: see Unusable; asked once for each verifier, of what those before it have left.

    Returns:
        (index -> the first verifier that accepts the problem, index -> why none does).
    """
    chosen: dict[int, str] = {}
    reasons: dict[int, list[str]] = {i: [] for i in range(len(problems))}
    for name in reward.hybrid:
        left = [i for i in reasons if i not in chosen]
        refused = unusable(name, [problems[i] for i in left])
        for at, i in enumerate(left):
            reason = refused.get(at)
            if reason is None and reward.use_of(name) == "math" and is_prose(problems[i].answer):
                reason = f"has the answer {problems[i].answer!r:.80}, which is prose"
            if reason is None:
                chosen[i] = name
            else:
                reasons[i].append(f"{name}: it {reason}")
    why = "; ".join
    return chosen, {
        i: f"is judged by {HYBRID}, but accepted by none of reward.hybrid={reward.hybrid}: "
        f"{why(found) or 'it is empty'}"
        for i, found in reasons.items()
        if i not in chosen
    }  # fmt: skip


def is_prose(answer: str) -> bool:
    """Return whether a ground truth has words, which math would compare letter by letter.

    Words are three letters or more, apart from LaTeX's commands and functions' names; those in
    \\text{} count where there is no digit, and are units otherwise.
    """
    gold = ground_truth(answer)
    has_digit = any(character.isdigit() for character in gold)

    def kept(match: re.Match[str]) -> str:
        return " " if has_digit or match["text"] is None else f" {match['text']} "

    words = _WORD.findall(_COMMAND.sub(kept, gold).lower())
    return any(word not in _FUNCTIONS for word in words) or gold.lower() == "no"

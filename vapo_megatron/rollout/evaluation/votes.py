"""The votes of majority@k: which samples of a problem gave the same answer, by the verifier.

Runs on the rank that sampled the responses; nothing is communicated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from vapo_megatron.reward.verifier import Verifier

Response = dict[str, Any]
"""One judged sample: `sample`, `status`, `answer` (as the verifier compared it, or None), `vote`
(see count_votes), `num_tokens`, `truncated`, and `text` if kept."""


def count_votes(verifier: Verifier, judged: Sequence[Sequence[Response]]) -> list[list[int | None]]:
    """Return each response's class of equal answers; None: it has no answer.

    Correct answers are one class. Others are equal if their texts are, or if the verifier judges
    the later one correct with the earlier one as ground truth; it is called only where that could
    change the majority. Answers that it could not judge are compared as text.

    Args:
        verifier: compares answers.
        judged: the responses of each problem.

    Returns:
        For each problem and response the index of its class, from 0 in order of appearance.
    """
    pairs: dict[tuple[str, str], None] = {}
    for responses in filter(_is_open, judged):
        wrong = dict.fromkeys(r["answer"] for r in responses if r["status"] == "wrong")
        pairs.update(dict.fromkeys(itertools.combinations(wrong, 2)))
    equal = _equal_pairs(verifier, list(pairs))
    return [_classes(responses, equal) for responses in judged]


def _is_open(responses: Sequence[Response]) -> bool:
    """Return whether the classes of wrong answers decide if the majority is correct."""
    correct = sum(r["status"] == "correct" for r in responses)
    wrong = [r["answer"] for r in responses if r["status"] != "correct" and r["answer"] is not None]
    largest = max(map(wrong.count, wrong), default=0)
    return largest <= correct <= len(wrong) and correct > 0


def _equal_pairs(verifier: Verifier, pairs: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the pairs (earlier, later) that the verifier judges equal."""
    earlier = list(dict.fromkeys(e for e, _ in pairs))
    unparsable = {earlier[i] for i in verifier.unparsable_answers(earlier)}
    judged = [(e, a) for e, a in pairs if e not in unparsable]
    verdicts = verifier.score([f"\\boxed{{{a}}}" for _, a in judged], [e for e, _ in judged])
    return {pair for pair, verdict in zip(judged, verdicts) if verdict.is_correct}


def _classes(responses: Sequence[Response], equal: set[tuple[str, str]]) -> list[int | None]:
    first_of_class: list[str | None] = []
    """The first answer of each class; None for the class of correct ones."""
    votes: list[int | None] = []
    for response in responses:
        answer = response["answer"]
        if answer is None:
            votes.append(None)
            continue
        name = None if response["status"] == "correct" else answer
        matching = (
            i
            for i, first in enumerate(first_of_class)
            if first == name or (first is not None and name is not None and (first, name) in equal)
        )
        vote = next(matching, len(first_of_class))
        if vote == len(first_of_class):
            first_of_class.append(name)
        votes.append(vote)
    return votes

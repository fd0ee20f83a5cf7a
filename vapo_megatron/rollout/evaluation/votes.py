"""Which samples of a problem gave the same answer, as the verifier judges: the votes of majority@k.

Asks the verifier on the rank that sampled the responses; nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vapo_megatron.reward.verifier import Verifier

Response = dict[str, Any]
"""One judged sample: `sample`, `status`, `answer` (as the verifier compared it, or None), `vote`
(see count_votes), `num_tokens`, `truncated`, and `text` where it is kept."""


def count_votes(verifier: Verifier, judged: Sequence[Sequence[Response]]) -> list[list[int | None]]:
    """Return the class of equal answers that each response's answer belongs to; None without one.

    Correct answers are one class. Others are equal when their texts are, or when the verifier finds
    the later one right with the earlier one as the ground truth; it is asked only where that could
    change which class has the most votes. Answers that it could not judge have their text alone.

    Args:
        verifier: compares answers.
        judged: the responses of each problem.

    Returns:
        For each problem and response the number of its class, from 0 in the order of appearance.
    """
    doubtful = [_wrong_answers(responses) if _is_open(responses) else [] for responses in judged]
    pairs = [
        (earlier, later)
        for answers in doubtful
        for i, later in enumerate(answers)
        for earlier in answers[:i]
    ]
    equal = _equal_pairs(verifier, list(dict.fromkeys(pairs)))
    return [_classes(responses, equal) for responses in judged]


def _is_open(responses: Sequence[Response]) -> bool:
    """Could the classes of wrong answers decide whether the majority is correct?"""
    correct = sum(r["status"] == "correct" for r in responses)
    wrong = [r["answer"] for r in responses if r["status"] != "correct" and r["answer"] is not None]
    largest = max(map(wrong.count, wrong), default=0)
    return largest <= correct <= len(wrong) and correct > 0


def _wrong_answers(responses: Sequence[Response]) -> list[str]:
    """Different wrong answers, in the order of appearance."""
    return list(dict.fromkeys(r["answer"] for r in responses if r["status"] == "wrong"))


def _equal_pairs(verifier: Verifier, pairs: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return those pairs (earlier, later) whose answers the verifier finds equal."""
    earlier = list(dict.fromkeys(e for e, _ in pairs))
    unreadable = {earlier[i] for i in verifier.unparsable_answers(earlier)}
    asked = [(e, a) for e, a in pairs if e not in unreadable]
    verdicts = verifier.score([_boxed(a) for _, a in asked], [e for e, _ in asked])
    return {pair for pair, verdict in zip(asked, verdicts) if verdict.is_correct}


def _classes(responses: Sequence[Response], equal: set[tuple[str, str]]) -> list[int | None]:
    first_of_class: list[str | None] = []
    """The answer with which a class began; None for the class of correct ones."""
    votes: list[int | None] = []
    for response in responses:
        answer = response["answer"]
        if answer is None:
            votes.append(None)
            continue
        name = None if response["status"] == "correct" else answer
        fitting = (
            i
            for i, first in enumerate(first_of_class)
            if first == name or (first is not None and name is not None and (first, name) in equal)
        )
        vote = next(fitting, len(first_of_class))
        if vote == len(first_of_class):
            first_of_class.append(name)
        votes.append(vote)
    return votes


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"

"""The votes of majority@k: which samples of a problem gave the same answer, by the verifier.

Runs on the rank that sampled the responses; nothing is communicated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from vapo_megatron.reward.verifier import Problem, RunningVerifier

Response = dict[str, Any]
"""One judged sample: `sample`, `status`, `score` (the verdict's own, or None), `answer` (as the
verifier compared it, or None), `vote` (see count_votes), `num_tokens`, `truncated`, `text` if
kept, and `token_ids` while the status is PENDING. Of an episode also `earned`, the sum of its
turns' rewards, `is_paid` where these are all that it gets, `cut_by`, the field that has cut it,
`begin` and `turns` (see turn_records) if its text is kept, and `sequence`, prompt and all, in place
of `token_ids`."""


def count_votes(
    verifier: RunningVerifier, problems: Sequence[Problem], judged: Sequence[Sequence[Response]]
) -> list[list[int | None]]:
    """Return each response's class of equal answers; None: it has no answer.

    Correct answers are one class. Others are equal if their texts are, or if the verifier says so;
    it is asked only where that could change the majority.

    Args:
        verifier: compares answers.
        problems: one for each group of responses.
        judged: the responses to each problem.

    Returns:
        For each problem and response the index of its class, from 0 in order of appearance.
    """
    pairs: dict[tuple[int, str, str], None] = {}
    for number, responses in enumerate(judged):
        if _is_open(responses):
            wrong = dict.fromkeys(r["answer"] for r in responses if r["status"] == "wrong")
            # A verifier of one's own may find a response wrong without naming its answer.
            wrong.pop(None, None)
            for first, second in itertools.combinations(wrong, 2):
                pairs[number, first, second] = None
    same = verifier.same_answers([(problems[n], a, b) for n, a, b in pairs])
    equal = {pair for pair, is_same in zip(pairs, same) if is_same}
    return [
        _classes(responses, {(a, b) for n, a, b in equal if n == number})
        for number, responses in enumerate(judged)
    ]


def _is_open(responses: Sequence[Response]) -> bool:
    """Return whether the classes of wrong answers decide if the majority is correct."""
    correct = sum(r["status"] == "correct" for r in responses)
    wrong = [r["answer"] for r in responses if r["status"] != "correct" and r["answer"] is not None]
    largest = max(map(wrong.count, wrong), default=0)
    return largest <= correct <= len(wrong) and correct > 0


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

"""Which answers count as the same, as the real verifier judges. Not exercised: sampling."""

import pytest

from vapo_megatron.reward.math_verifier import MathVerifier
from vapo_megatron.reward.verifier import Problem
from vapo_megatron.rollout.evaluation.statistics import majority_at_k
from vapo_megatron.rollout.evaluation.votes import count_votes


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier(num_workers=1, timeout_seconds=60) as shared:
        yield shared


def votes_of(verifier, *answers):
    """Votes of responses given as (status, answer)."""
    names = {"c": "correct", "w": "wrong", "u": "unparsable", "t": "timed_out"}
    judged = [{"status": names[s], "answer": a} for s, a in answers]
    return count_votes(verifier, [Problem("1 + 2", "3")], [judged])[0]


@pytest.mark.parametrize(
    ("answers", "votes"),
    [
        # Equal values are one class, whatever their texts: 3 to 3.
        (
            [("c", "3"), ("w", "1/2"), ("c", "3.0"), ("w", "0.5"), ("c", "6/2"),
             ("w", "\\frac{1}{2}")],
            [0, 1, 0, 1, 0, 1],
        ),
        ([("w", "5"), ("c", "3"), ("w", "05"), ("w", "7"), ("c", "3")], [0, 1, 0, 2, 1]),
        # Apart, each wrong answer would tie with the right one; together they win.
        ([("c", "3"), ("w", "0.5"), ("w", "1/2")], [0, 1, 1]),
        # What cannot stand as a ground truth, or in a box, is its text.
        ([("w", "???"), ("c", "3"), ("w", "2"), ("c", "3")], [0, 1, 2, 1]),
        ([("w", "2 {"), ("c", "3"), ("w", "2"), ("c", "3")], [0, 1, 2, 1]),
        ([("w", "2"), ("c", "3"), ("w", "2 {"), ("c", "3")], [0, 1, 2, 1]),
        # No answer, no vote.
        ([("u", None), ("c", "3"), ("w", "4"), ("u", None)], [None, 0, 1, None]),
        # What could not be judged is its text, and is compared with nothing.
        (
            [("t", "9^{9^{9^{9}}}"), ("c", "3"), ("t", "9^{9^{9^{9}}}"), ("c", "3"),
             ("u", "of no value"), ("u", "of no value")],
            [0, 1, 0, 1, 2, 2],
        ),
        # Solutions are the same in any order; one of them alone is another answer.
        ([("w", "1, 2"), ("c", "3"), ("w", "2, 1"), ("c", "3"), ("w", "2")], [0, 1, 0, 1, 2]),
    ],
)  # fmt: skip
def test_votes(verifier, answers, votes):
    assert votes_of(verifier, *answers) == votes


class Unasked:
    """A verifier that must not be asked anything."""

    def same_answers(self, pairs):
        assert not pairs
        return []


@pytest.mark.parametrize(
    "answers",
    [
        # 3 correct, 2 others; 1 correct, one answer thrice; none correct.
        [("c", "3"), ("c", "3"), ("c", "3"), ("w", "1/2"), ("w", "0.5")],
        [("c", "3"), ("w", "4"), ("w", "4"), ("w", "0.5"), ("w", "1/2")],
        [("w", "1/2"), ("w", "0.5"), ("u", None)],
    ],
)
def test_nothing_is_compared_where_it_cannot_change_the_majority(answers):
    correct = [status == "c" for status, _ in answers]
    votes = votes_of(Unasked(), *answers)
    assert majority_at_k(votes, correct) == (1.0 if sum(correct) == 3 else 0.0)


def test_answers_are_compared_by_their_own_problems_verifier():
    class ByFirstLetter:
        def same_answers(self, pairs):
            self.pairs = pairs
            return [p.answer == "loose" and a[0] == b[0] for p, a, b in pairs]

    answers = [("c", "x"), ("w", "ab"), ("w", "ac"), ("w", None)]
    names = {"c": "correct", "w": "wrong"}
    judged = [{"status": names[s], "answer": a} for s, a in answers]
    verifier, problems = ByFirstLetter(), [Problem("p", "strict"), Problem("q", "loose")]
    assert count_votes(verifier, problems, [judged, judged]) == [[0, 1, 2, None], [0, 1, 1, None]]
    assert verifier.pairs == [(problem, "ab", "ac") for problem in problems]

"""Judges final answers as mathematics, in processes that are killed when a computation hangs.

The parent extracts the final answer and decides what needs no mathematics: no answer, equal texts,
plain integers. The rest goes to worker processes, each distinct (answer, ground truth) once until
`forget`: also one that timed out, so that a group that shares an answer waits for it once.
"""

from __future__ import annotations

from collections.abc import Sequence

from vapo_megatron.data.problems import Problem
from vapo_megatron.errors import DataError
from vapo_megatron.reward.extraction import (
    MAX_ANSWER_CHARACTERS,
    can_be_given,
    clean,
    final_answer,
    ground_truth,
    plain_integer,
    with_unit,
)
from vapo_megatron.reward.verifier import Status, Verdict
from vapo_megatron.sandbox.channel import Reply
from vapo_megatron.sandbox.pool import WorkerPool
from vapo_megatron.sandbox.process import HandlerRefused

MEMORY_LIMIT_BYTES = 1 << 30
"""Address space of a worker, beyond its libraries: answers like 2^(10^9) would take all memory."""


_MISSING = ("None", "null", "NULL", "nan", "NaN", "<NA>")
"""What libraries write as text in place of a missing value."""
_TOO_SLOW = "has an answer that takes too long to parse"
_REFUSED = {
    "timed_out": _TOO_SLOW,
    "bad_gold": "has the answer {}, which the verifier cannot parse",
    "wrong": "has the answer {}, which is judged wrong when a response gives it",
}
"""Of a ground truth that is its own response's answer, by the worker's status."""


class MathVerifier:
    """Compares final answers with ground truths: a RunningVerifier, and a context manager.

    Args:
        num_workers: worker processes, started on first use, all at once.
        timeout_seconds: limit for one answer, counted from when a worker receives it.
        memory_limit_bytes: address space of one worker, beyond what its libraries take.
    """

    def __init__(
        self,
        num_workers: int = 2,
        timeout_seconds: float = 5.0,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        if num_workers < 1 or timeout_seconds <= 0:
            raise ValueError(
                f"num_workers={num_workers} must be at least 1 and "
                f"timeout_seconds={timeout_seconds} above 0"
            )
        self._pool = WorkerPool(
            "vapo_megatron.reward.mathematics.judge:make_handler", {}, num_workers, timeout_seconds,
            memory_limit_bytes,
        )  # fmt: skip
        self._known_answers: dict[str, str] = {}
        self._judged: dict[tuple[str | None, str | None], Status] = {}

    def __enter__(self) -> MathVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the workers now instead of on first use; returns immediately."""
        self._pool.start()

    def close(self) -> None:
        """Kill the workers. Using the verifier again starts new ones."""
        self._pool.close()

    @property
    def process_ids(self) -> list[int]:
        """Of the running workers."""
        return self._pool.process_ids

    def score(
        self, responses: Sequence[str], problems: Sequence[Problem] | Sequence[str]
    ) -> list[Verdict]:
        """Judge; see Verifier.

        Args:
            responses: their text, without the prompts.
            problems: or their ground truths alone. One is an expression, or a text that ends in a
                marked one.

        Raises:
            DataError: a ground truth cannot be parsed.
            ValueError: the two differ in length.
        """
        answers = [p if isinstance(p, str) else p.answer for p in problems]
        if len(responses) != len(answers):
            raise ValueError(
                f"{len(responses)} responses for {len(answers)} answers; give one answer each"
            )
        read = self._read(answers)
        bad = [i for i, answer in enumerate(answers) if read[answer] not in ("", _TOO_SLOW)]
        if bad:
            raise DataError(
                f"the row of response {bad[0]} {read[answers[bad[0]]]} ({len(bad)} of "
                f"{len(answers)} ground truths cannot be used); correct or remove the row"
            )
        golds = [self._known_answers.get(answer) for answer in answers]
        found = [final_answer(response, with_unit) for response in responses]
        decided = [_decide(answer, gold) for answer, gold in zip(found, golds)]
        undecided = [pair for pair, status in zip(zip(found, golds), decided) if status is None]
        judged = self._judged  # Another thread may call `forget`.
        pairs = [pair for pair in dict.fromkeys(undecided) if pair not in judged]
        replies = self._ask([{"gold": gold, "answer": answer} for answer, gold in pairs])
        judged.update(zip(pairs, map(_status, replies)))
        return [
            Verdict(status or judged[answer, gold], answer=_excerpt(answer))
            for answer, gold, status in zip(found, golds, decided)
        ]

    def forget(self) -> None:
        """Forget verdicts; see Verifier. Ground truths stay known."""
        self._judged = {}

    def unusable(self, problems: Sequence[Problem]) -> dict[int, str]:
        """Return index -> what is wrong; see RunningVerifier."""
        read = self._read([problem.answer for problem in problems])
        return {i: read[p.answer] for i, p in enumerate(problems) if read[p.answer]}

    def same_answers(self, pairs: Sequence[tuple[Problem, str, str]]) -> list[bool]:
        """Return whether the second answer is correct with the first as ground truth.

        Both may be texts that end in a marked answer, as ground truths may.
        """
        unparsable = set(self.unparsable_answers([first for _, first, _ in pairs]))
        asked = [i for i in range(len(pairs)) if i not in unparsable]
        verdicts = self.score(
            [f"\\boxed{{{ground_truth(pairs[i][2], with_unit)}}}" for i in asked],
            [pairs[i][1] for i in asked],
        )
        equal = {i for i, verdict in zip(asked, verdicts) if verdict.is_correct}
        return [i in equal for i in range(len(pairs))]

    def unparsable_answers(self, answers: Sequence[str]) -> list[int]:
        """Return the indices of ground truths that cannot be used, or not within the time limit.

        The others are cached and cost nothing later.
        """
        read = self._read(answers)
        return [i for i, answer in enumerate(answers) if read[answer]]

    def _read(self, answers: Sequence[str]) -> dict[str, str]:
        """Return what is wrong with each distinct ground truth; "": nothing.

        One is right if it is judged correct as a response's final answer.
        """
        reasons: dict[str, str] = {}
        golds: dict[str, str] = {}
        for answer in dict.fromkeys(answers):
            if answer in self._known_answers:
                reasons[answer] = ""
                continue
            gold, reasons[answer] = _gold(answer)
            if plain_integer(gold) is not None:
                self._known_answers[answer] = gold
            elif not reasons[answer]:
                golds[answer] = gold
        replies = self._ask([{"gold": gold, "answer": gold} for gold in golds.values()])
        for (answer, gold), reply in zip(golds.items(), replies):
            status = reply.get("status", "timed_out")
            if status == "correct":
                self._known_answers[answer] = gold
            else:
                reasons[answer] = _REFUSED[status].format(f"{answer!r:.80}")
        return reasons

    def _ask(self, requests: Sequence[dict[str, str | None]]) -> list[Reply]:
        try:
            return self._pool.run(requests)
        except HandlerRefused as error:
            raise RuntimeError(
                f"the verifier's worker did not start; is math-verify installed?\n{error}"
            ) from None


def _gold(answer: str) -> tuple[str, str]:
    """Return a ground truth's expression, and what is wrong with it as a text; "": nothing."""
    if not answer:
        return "", "has no ground truth"
    subject = f"has the answer {answer!r:.80}, which"
    try:
        gold = ground_truth(answer, with_unit)
    except ValueError as error:
        return "", f"{subject} {error}"
    if answer in _MISSING:
        return "", f"{subject} stands for a missing value"
    if not 0 < len(gold) <= MAX_ANSWER_CHARACTERS:
        return "", f"{subject} is empty or over {MAX_ANSWER_CHARACTERS} characters"
    if not can_be_given(gold, with_unit):
        return "", f"{subject} no response can give as its marked answer"
    return gold, ""


def _decide(answer: str | None, gold: str | None) -> Status | None:
    """Return the status if it needs no mathematics, else None."""
    if gold is None:  # Parsing it took too long now, though not before the run.
        return "timed_out"
    if answer is None or _is_too_long(answer):
        return "unparsable"
    if answer == gold:
        return "correct"
    number, expected = plain_integer(answer), plain_integer(gold)
    if number is None or expected is None:
        return None
    return "correct" if number == expected else "wrong"


def _status(reply: Reply) -> Status:
    if "status" not in reply:  # Over the time or memory limit, dead, or math-verify's own error.
        return "timed_out"
    assert reply["status"] in ("correct", "wrong", "unparsable"), f"a worker answered {reply}"
    return reply["status"]


def _excerpt(answer: str | None) -> str | None:
    """Return an answer as verdicts have it: without its unit, so that votes count it as one."""
    return None if answer is None or _is_too_long(answer) else clean(answer)


def _is_too_long(answer: str | None) -> bool:
    return answer is not None and len(answer) > MAX_ANSWER_CHARACTERS

"""Judges final answers with math-verify, in processes that are killed when a computation hangs.

The parent extracts the final answer and decides what needs no mathematics: no answer, equal texts,
plain integers. The rest goes to worker processes, each distinct (answer, ground truth) once until
`forget`: also one that timed out, so that a group that shares an answer waits for it once.
"""

from __future__ import annotations

from collections.abc import Sequence

from vapo_megatron.errors import DataError
from vapo_megatron.reward.extraction import (
    MAX_ANSWER_CHARACTERS,
    final_answer,
    ground_truth,
    plain_integer,
)
from vapo_megatron.reward.pool import DIED, OVER_TIME, JudgePool
from vapo_megatron.reward.verifier import Status, Verdict

MEMORY_LIMIT_BYTES = 1 << 30
"""Address space of a worker. It needs 0.1 GB; answers like 2^(10^9) would take all memory."""


class MathVerifier:
    """Compares final answers with ground truths: a Verifier, and a context manager that closes it.

    Args:
        num_workers: worker processes, started on first use, all at once.
        timeout_seconds: limit for one answer, counted from when a worker receives it.
        memory_limit_bytes: address space of one worker.
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
        self._pool = JudgePool(num_workers, timeout_seconds, memory_limit_bytes)
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

    def score(self, responses: Sequence[str], answers: Sequence[str]) -> list[Verdict]:
        """Judge; see Verifier. An answer is an expression, or a text that ends in a marked one.

        Raises:
            DataError: a ground truth cannot be parsed.
            ValueError: the two differ in length.
        """
        if len(responses) != len(answers):
            raise ValueError(
                f"{len(responses)} responses for {len(answers)} answers; give one answer each"
            )
        read = self._read(answers)
        unparsable = [i for i, answer in enumerate(answers) if read[answer] == "unparsable"]
        if unparsable:
            bad = answers[unparsable[0]]
            raise DataError(
                f"ground truth {bad!r} of response {unparsable[0]} cannot be parsed as mathematics "
                f"({len(unparsable)} of {len(answers)} cannot); correct or remove its row"
            )
        golds = [self._known_answers.get(answer) for answer in answers]
        found = [final_answer(response) for response in responses]
        decided = [_decide(answer, gold) for answer, gold in zip(found, golds)]
        undecided = [pair for pair, status in zip(zip(found, golds), decided) if status is None]
        judged = self._judged  # Another thread may call `forget`.
        pairs = [pair for pair in dict.fromkeys(undecided) if pair not in judged]
        statuses = self._pool.run([{"gold": gold, "answer": answer} for answer, gold in pairs])
        judged.update(zip(pairs, map(_as_status, statuses)))
        return [
            Verdict(status or judged[answer, gold], None if _is_too_long(answer) else answer)
            for answer, gold, status in zip(found, golds, decided)
        ]

    def forget(self) -> None:
        """Forget verdicts; see Verifier. Ground truths stay known."""
        self._judged = {}

    def unparsable_answers(self, answers: Sequence[str]) -> list[int]:
        """Return the indices of ground truths that cannot be parsed within the time limit.

        The others are cached and cost nothing later.
        """
        read = self._read(answers)
        return [i for i, answer in enumerate(answers) if read[answer] != "correct"]

    def _read(self, answers: Sequence[str]) -> dict[str, Status]:
        """Parse each distinct ground truth -> "correct", "unparsable" or "timed_out"."""
        read: dict[str, Status] = {}
        golds: dict[str, str] = {}
        for answer in dict.fromkeys(answers):
            gold = self._known_answers.get(answer) or ground_truth(answer)
            if answer in self._known_answers or plain_integer(gold) is not None:
                self._known_answers[answer] = gold
                read[answer] = "correct"
            elif 0 < len(gold) <= MAX_ANSWER_CHARACTERS:
                golds[answer] = gold
            else:
                read[answer] = "unparsable"
        statuses = self._pool.run([{"gold": gold, "answer": None} for gold in golds.values()])
        for (answer, gold), status in zip(golds.items(), statuses):
            read[answer] = "unparsable" if status == "bad_gold" else _as_status(status)
            if status == "correct":
                self._known_answers[answer] = gold
        return read


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


def _as_status(status: str) -> Status:
    if status in (OVER_TIME, DIED, "out_of_memory"):
        return "timed_out"
    assert status in ("correct", "wrong", "unparsable"), f"a worker answered {status!r}"
    return status  # type: ignore[return-value]


def _is_too_long(answer: str | None) -> bool:
    return answer is not None and len(answer) > MAX_ANSWER_CHARACTERS

"""Verifiers as users write them, for test_isolated.py and test_verifiers.py."""

import ctypes
import os
import time

from vapo_megatron.reward.verifier import Verdict


class Contains:
    """Correct where the response has the ground truth in it; scored by its share of the text."""

    def __init__(self, ignore_case: bool = False) -> None:
        self.ignore_case = ignore_case

    def score(self, responses, problems):
        """Judge; see Verifier."""
        return [self._one(r, p) for r, p in zip(responses, problems)]

    def _one(self, response, problem):
        text, answer = response, problem.answer
        if self.ignore_case:
            text, answer = text.lower(), answer.lower()
        note = f"for {problem.metadata.get('who', 'nobody')} by {problem.prompt}"
        status = "correct" if answer in text else "wrong"
        return Verdict(status, score=len(answer) / max(len(text), 1), answer=text[:8], note=note)


class Strict(Contains):
    """Checks its problems, and compares answers by their first letter."""

    def check(self, problem):
        """Refuse a problem without a ground truth."""
        if problem.answer == "breaks":
            raise KeyError("tests")
        return None if problem.answer else "has no ground truth"

    def same_answer(self, first, second, problem):
        """By the first letter."""
        return first[0] == second[0]


class Misbehaves:
    """Does what the response says."""

    def score(self, responses, problems):
        """Judge; see Verifier."""
        return [getattr(self, response)() for response in responses]

    def well(self):
        return Verdict("correct")

    def loop(self):
        while True:
            pass

    def sleep(self):
        time.sleep(600)

    def child(self):
        """Leaves a process that holds its pipes."""
        if os.fork() == 0:
            time.sleep(600)
        time.sleep(600)

    def raise_it(self):
        raise RuntimeError("no such test")

    def leave(self):
        raise SystemExit("good bye")

    def crash(self):
        ctypes.string_at(0)

    def vanish(self):
        os._exit(0)

    def memory(self):
        return bytearray(10_000_000_000)

    def no_verdict(self):
        return True

    def bad_status(self):
        return Verdict("good")

    def not_finite(self):
        return Verdict("correct", score=float("nan"))

    def prints(self):
        print("x" * 300_000, flush=True)
        return Verdict("correct")

    def long(self):
        return Verdict("correct", answer="y" * 3_000_000)


class CountsWrong:
    """Returns too many verdicts."""

    def score(self, responses, problems):
        """Judge; see Verifier."""
        return [Verdict("correct")] * 2


class NeedsOption:
    """Cannot be built without an option."""

    def __init__(self, limit):
        self.limit = limit

    def score(self, responses, problems):
        """Judge; see Verifier."""
        return [Verdict("wrong")] * len(responses)


class NoVerifier:
    """Has no method score."""

"""The verifier `code`: runs the response's program against the problem's tests, in a sandbox.

The program sees only its input. Expected results stay in this process, or in a separate one that
never runs code from the response; comparison happens there.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vapo_megatron.errors import tell
from vapo_megatron.reward.code_outputs import same_text, same_value
from vapo_megatron.reward.code_tests import (
    LANGUAGES,
    CallTest,
    ScriptTest,
    Test,
    check_names,
    given_code,
    parsed,
    read_tests,
)
from vapo_megatron.reward.fenced import last_block
from vapo_megatron.reward.verifier import Problem, Verdict
from vapo_megatron.sandbox.client import WALL_FACTOR, Budget, Outcome, Sandbox
from vapo_megatron.sandbox.inside import PASSED
from vapo_megatron.sandbox.plain_values import MAX_INTEGER_DIGITS, decode

MODULES = ("numpy", "numpy.fft", "numpy.linalg", "numpy.polynomial", "numpy.random")
EXTRA_OUTPUT_BYTES = 1 << 20
"""That a program may print beyond what is expected."""


PROGRAM_SECONDS = 30.0


def longest_seconds(options: Mapping[str, Any]) -> float:
    """Return how long judging a response takes at most, with room for a machine at other work.

    The programs' own limits end them; a judging process is killed only if it hangs itself.
    """
    seconds = options.get("program_seconds")
    return WALL_FACTOR * (seconds if isinstance(seconds, int | float) else PROGRAM_SECONDS) + 60


@functools.lru_cache(maxsize=8)  # Responses to one problem often follow each other.
def _read(problem: Problem) -> tuple[list[Test], str]:
    return read_tests(problem), given_code(problem)


class CodeVerifier:
    """A Verifier; one process runs one program after the other.

    Args:
        test_seconds: CPU time of a program in one test; time in which it waits counts a third.
        program_seconds: the same, in all tests of a response.
        memory_gb: address space of a program beyond the interpreter's, in 1e9 bytes.
        tolerance: relative and absolute, for numbers with a fraction.
        every_test: run the tests behind a failed one too, for the score.
        modules: what programs can import beside the standard library.
    """

    def __init__(
        self,
        test_seconds: float = 6.0,
        program_seconds: float = PROGRAM_SECONDS,
        memory_gb: float = 1.0,
        tolerance: float = 1e-6,
        every_test: bool = False,
        modules: Sequence[str] = MODULES,
    ) -> None:
        for name, value, lowest in (
            ("test_seconds", test_seconds, 1e-3),
            ("program_seconds", program_seconds, 1e-3),
            ("memory_gb", memory_gb, 1e-3),
            ("tolerance", tolerance, 0),
        ):
            if not isinstance(value, int | float) or value < lowest:
                raise ValueError(f"{name}={value!r} must be a number, {lowest} at least")
        self._test_seconds = test_seconds
        self._program_seconds = program_seconds
        self._memory_bytes = int(memory_gb * 1e9)
        self._tolerance = tolerance
        self._every_test = every_test
        sys.set_int_max_str_digits(MAX_INTEGER_DIGITS)
        self._sandbox = Sandbox(modules)
        self._sandbox.start()
        if self._sandbox.refusal:
            tell(
                "warning: the verifier code runs programs as this process's own user, because "
                f"the container allows no other ({self._sandbox.refusal}): the number of their "
                "threads is limited by their memory alone"
            )

    def check(self, problem: Problem) -> str | None:
        """Return what is wrong with a problem's tests, or None."""
        try:
            return check_names(read_tests(problem))
        except ValueError as error:
            return str(error)

    def score(self, responses: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        """Judge; see Verifier. The score is the fraction of all tests that were passed."""
        return [self._judge(r, p) for r, p in zip(responses, problems, strict=True)]

    def _judge(self, response: str, problem: Problem) -> Verdict:
        program = last_block(response, LANGUAGES, parsed)
        if program is None:
            return Verdict("unparsable", note="no closed block of Python")
        tests, given = _read(problem)
        passed, note, seconds_left = 0, "", self._program_seconds
        for number, test in enumerate(tests, 1):
            began = time.monotonic()
            outcome, failure = self._run(
                program, test, given, min(self._test_seconds, seconds_left)
            )
            seconds_left -= max(outcome.cpu_seconds, (time.monotonic() - began) / WALL_FACTOR)
            passed += not failure
            if failure and not note:
                note = f"test {number} of {len(tests)}: {failure}"
            if number < len(tests) and seconds_left <= 0:
                note = note or f"more than {self._program_seconds:g} seconds for all tests"
                break
            if failure and not self._every_test:
                break
        return Verdict(
            "correct" if passed == len(tests) else "wrong", score=passed / len(tests), note=note
        )

    def _run(self, program: str, test: Test, given: str, cpu_seconds: float) -> tuple[Outcome, str]:
        """Run one test -> how it went, and what was wrong, empty: nothing."""
        size = EXTRA_OUTPUT_BYTES
        if isinstance(test, ScriptTest):
            size += len(test.expected)
        elif isinstance(test, CallTest):
            size += 4 * len(json.dumps(test.expected))
        budget = Budget(cpu_seconds, self._memory_bytes, size)
        if isinstance(test, ScriptTest):
            outcome = self._sandbox.run(program, test.text, budget)
            return outcome, outcome.failure or self._wrong_text(outcome, test)
        if isinstance(test, CallTest):
            outcome = self._sandbox.call(program, test.function, test.arguments, budget, given)
            return outcome, outcome.failure or self._wrong_value(outcome, test)
        outcome = self._sandbox.test(program, test.text, budget, test.functions, given)
        if not outcome.failure and outcome.output != PASSED:
            return outcome, "the test has ended early"
        return outcome, outcome.failure

    def _wrong_text(self, outcome: Outcome, test: ScriptTest) -> str:
        found = outcome.output.decode(errors="replace")
        if same_text(found, test.expected, self._tolerance):
            return ""
        return f"printed {found.strip()!r:.60}, not {test.expected.strip()!r:.60}"

    def _wrong_value(self, outcome: Outcome, test: CallTest) -> str:
        try:
            reply = json.loads(outcome.output)
            if "raised" in reply:
                return f"{reply['raised']}: {reply['message']}"[:200]
            found = decode(reply["returned"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return "no value was returned"
        accepted = [test.expected, *(test.expected if test.is_wrapped else ())]
        if any(same_value(found, expected, self._tolerance) for expected in accepted):
            return ""
        return f"returned {found!r:.60}, not {test.expected!r:.60}"

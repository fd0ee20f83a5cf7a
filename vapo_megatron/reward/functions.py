"""A plain function as a verifier: its parameters' names say what it is given.

    def near(response, answer, tolerance=0): ...   one response, the ground truth, a column
    def best(responses, **row): ...                all responses to one prompt, and every column

Runs in a worker; see isolated.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from vapo_megatron.data.problems import Problem
from vapo_megatron.reward.verifier import Verdict, is_finite, python_value

RESPONSE, RESPONSES = "response", "responses"
DUE = "True or False, a finite number, or a Verdict"


class WrongReturn(Exception):
    """A verifier returned a value of the wrong form; the message says both."""


class FunctionVerifier:
    """A Verifier over a function; see reward.verifier.Verifier.

    Each parameter is given by its name: `response`, or `responses` for all responses to a prompt at
    once, `prompt`, `answer` (the ground truth), `problem`, or a column of the row; `**row` receives
    the columns that no other parameter names. A parameter with a default may lack its column.

    Args:
        function: returns a verdict, a bool or a number, with `responses` a list of them.
        options: keyword arguments that are the same in every call.
        full_score: the least number that is a correct response; None: numbers have no range, so
            they are refused.

    Raises:
        TypeError: it has a parameter without a name, takes neither or both of `response` and
            `responses`, or has no parameter for an option.
    """

    def __init__(
        self, function: Callable[..., Any], options: Mapping[str, Any], full_score: float | None
    ) -> None:
        self._name = getattr(function, "__name__", type(function).__name__)
        parameters = list(inspect.signature(function).parameters.values())
        inspect.signature(function).bind_partial(**options)
        self._function = functools.partial(function, **options)
        self._full_score = full_score
        unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
        if wrong := [str(p) for p in parameters if p.kind in unnamed]:
            raise TypeError(f"{self._name} has the parameter {wrong[0]}, which has no name")
        self._takes_row = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)
        self._asked = {
            p.name: p.default is inspect.Parameter.empty
            for p in parameters
            if p.kind != inspect.Parameter.VAR_KEYWORD and p.name not in options
        }
        if (RESPONSE in self._asked) == (RESPONSES in self._asked):
            raise TypeError(
                f"{self._name}({', '.join(map(str, parameters))}) must have a parameter named "
                "response, or one named responses for all responses to a prompt at once"
            )
        self.sees_group = RESPONSES in self._asked

    def check(self, problem: Problem) -> str | None:
        """Return which columns the row lacks; None: it has all that are asked for."""
        given = {RESPONSE, RESPONSES, *_given(problem)}
        missing = [name for name, is_due in self._asked.items() if is_due and name not in given]
        if not missing:
            return None
        columns = ", ".join(problem.metadata) or "none"
        return (
            f"has no column {missing[0]}, which {self._name} has a parameter for; there are "
            f"response, responses, prompt, answer, problem, and the row's other columns: {columns}"
        )

    def score(self, responses: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        """Judge the responses to one problem.

        Raises:
            WrongReturn: the function returned something else than verdicts.
        """
        arguments = dict(self._arguments(problems[0]))
        if self.sees_group:
            results = self._function(**arguments, responses=list(responses))
            try:
                results = list(results)
            except TypeError:
                raise WrongReturn(
                    f"returned {excerpt(results)}, not a list with one of these for each "
                    f"response: {DUE}"
                ) from None
            if len(results) != len(responses):
                raise WrongReturn(
                    f"returned {len(results)} results for {len(responses)} responses: "
                    f"{excerpt(results)}, not one for each"
                )
        else:
            results = [self._function(**arguments, response=text) for text in responses]
        return [as_verdict(result, self._full_score) for result in results]

    def _arguments(self, problem: Problem) -> Iterator[tuple[str, Any]]:
        given = _given(problem)
        for name in self._asked:
            if name in given and name not in (RESPONSE, RESPONSES):
                yield name, given[name]
        if self._takes_row:
            fixed = {*self._asked, *self._function.keywords, "prompt", "answer", "problem"}
            yield from ((k, v) for k, v in problem.metadata.items() if k not in fixed)


def as_verdict(result: Any, full_score: float | None) -> Verdict:
    """Return the verdict that a bool, a number or a Verdict is.

    Args:
        result: the user's.
        full_score: see FunctionVerifier.

    Raises:
        WrongReturn: it is something else.
    """
    if isinstance(result, Verdict):
        return result
    value = python_value(result)
    if isinstance(value, bool):
        return Verdict("correct" if value else "wrong")
    if not is_finite(value):
        raise WrongReturn(f"returned {excerpt(result)}, not {DUE}")
    if full_score is None:
        raise WrongReturn(
            f"returned the number {value:g}, a score, but reward.from_score=null; set it to "
            "the scores' range [low, high], such as [0, 1], or return True or False"
        )
    return Verdict("correct" if value >= full_score else "wrong", score=float(value))


def _given(problem: Problem) -> dict[str, Any]:
    own = {"prompt": problem.prompt, "answer": problem.answer, "problem": problem}
    return {**problem.metadata, **own}


def excerpt(value: Any) -> str:
    """Return the beginning of a value's repr."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."

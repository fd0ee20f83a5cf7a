"""A generative reward model as a verifier: a language model judges responses.

`Judge` grades one response, given the problem and its ground truth (arXiv 2503.22230, section 3.1).
`Pairwise` compares it with the ground truth or a reference answer, and the probability that the
response wins is its score (arXiv 2504.04950).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, get_args

from vapo_megatron.data.problems import Problem
from vapo_megatron.errors import ConfigError, tell
from vapo_megatron.reward.choices import named_choice
from vapo_megatron.reward.endpoint import Endpoint
from vapo_megatron.reward.judge_prompt import (
    JUDGE_TEMPLATE,
    PAIRWISE_TEMPLATE,
    fields,
    filled,
    final_part,
    read,
)
from vapo_megatron.reward.replies import Answer
from vapo_megatron.reward.verifier import RunningVerifier, Status, Verdict

MOST_LIKELY_TOKENS = 20
"""Whose log-probabilities are asked for; what OpenAI's API allows at most."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Judge(RunningVerifier):
    """Asks a language model about each response.

    Args:
        base_url, model: the endpoint, such as http://127.0.0.1:8000/v1, and its model's name.
        template: text, or the path of a file, with {prompt}, {answer}, {final} (the final answer,
            or else the response's end), {response} and {mark} (letters that no other field's text
            has); a row's other columns by their names.
        choices: what the model may answer -> a status of Verdict, or a score.
        correct_from: the least score of a correct response.
        chat: through the chat template of the model; false: as bare text.
        constrained: let vLLM allow nothing but the choices; false: the last choice that the answer
            names counts, so that the model may think before; see choices.py.
        max_tokens: of an answer; one that is cut there is no verdict, but for a whole choice.
        response_characters: a longer response is cut at its beginning.
        concurrency: requests at a time, of each inference engine.
        timeout_seconds: limit for one try, from the server's queue to the answer's last byte.
        outage_seconds: how long a request is repeated while the server is away.
        cache: directory for answers, by content; None: none.
        key_variable: the environment variable that has the endpoint's key.

    Raises:
        ConfigError: an option is not what it must be.
    """

    base_url: str
    model: str
    template: str = JUDGE_TEMPLATE
    choices: Mapping[str, Status | float] | None = None
    correct_from: float = 0.5
    chat: bool = True
    constrained: bool = True
    max_tokens: int = 16
    response_characters: int = 20_000
    concurrency: int = 64
    timeout_seconds: float = 60.0
    outage_seconds: float = 600.0
    cache: str | None = None
    key_variable: str = "OPENAI_API_KEY"

    def __post_init__(self) -> None:
        default: dict[str, Status | float] = {"YES": "correct", "NO": "wrong"}
        self._choices = dict(self.choices or default)
        _check_choices(self._choices)
        self._template = read(self.template, self._needed)
        self._has_told = False
        self._endpoint = Endpoint(
            self.base_url, self.model, chat=self.chat, concurrency=self.concurrency,
            timeout_seconds=self.timeout_seconds, outage_seconds=self.outage_seconds,
            cache=self.cache, key_variable=self.key_variable,
            body={"max_tokens": self.max_tokens, "temperature": 0.0, **self._body()},
        )  # fmt: skip

    _needed: ClassVar[tuple[tuple[str, ...], ...]] = (("final", "response"),)
    """Of each of these the template must have one."""
    _given: ClassVar[frozenset[str]] = frozenset({"prompt", "final", "response", "mark"})
    """Fields that every problem has."""

    def _body(self) -> dict[str, Any]:
        return {"structured_outputs": {"choice": list(self._choices)}} if self.constrained else {}

    def score(self, responses: Sequence[str], problems: Sequence[Problem]) -> Iterator[Verdict]:
        """Ask about each response, all at once; see RunningVerifier."""
        prompts = [
            filled(self._template, p, response=self._end_of(r), final=final_part(r))
            for r, p in zip(responses, problems)
        ]
        return map(self._verdict, self._endpoint.ask(prompts))

    def _verdict(self, answer: Answer) -> Verdict:
        if answer.problem:
            return self._failed(answer.problem)
        try:
            choice = named_choice(answer.text, self._choices, may_think=not self.constrained)
        except ValueError as error:
            return self._failed(str(error))
        if answer.is_truncated and not self._is_whole(answer.text, choice):
            return self._failed(f"its answer was cut at max_tokens={self.max_tokens}")
        meaning = self._choices[choice]
        if isinstance(meaning, str):
            return Verdict(meaning, note=f"the judge said {choice}")
        return self._scored(meaning, f"the judge said {choice}")

    def _is_whole(self, text: str, choice: str) -> bool:
        """Return whether a cut answer is a choice that nothing could have followed."""
        longer = any(c != choice and c.startswith(choice) for c in self._choices)
        return self.constrained and text.strip() == choice and not longer

    def _scored(self, score: float, note: str) -> Verdict:
        status: Status = "correct" if score >= self.correct_from else "wrong"
        return Verdict(status, score=score, note=note)

    def _failed(self, problem: str) -> Verdict:
        if not self._has_told:
            self._has_told = True
            tell(
                f"warning: the judge gave no verdict: {problem}; such responses have the status "
                "failed, and later failures are only counted"
            )
        return Verdict("failed", note=problem)

    def _end_of(self, response: str) -> str:
        return response[-self.response_characters :]

    def unusable(self, problems: Sequence[Problem]) -> dict[int, str]:
        """Return the problems that lack what the template names."""
        asked = sorted(fields(self._template) - self._given)
        reasons = {}
        for i, problem in enumerate(problems):
            known = {**problem.metadata, "answer": problem.answer}
            missing = [name for name in asked if known.get(name) in (None, "")]
            if missing:
                reasons[i] = f"has no {', '.join(missing)}, which the judge's template names"
        return reasons

    def close(self) -> None:
        """Stop asking."""
        self._endpoint.close()


@dataclasses.dataclass(kw_only=True, eq=False)
class Pairwise(Judge):
    """Asks which of two answers is better, the response or a reference, in both orders.

    The score is the mean over both orders of p(response) / (p(response) + p(reference)), the first
    token's probabilities; the paper leaves open how position bias is removed and where a win
    begins: here by the mean, and at correct_from.

    Args:
        options: see Judge; its template has {prompt}, {a}, {b} and {mark}. It asks for one token,
            so that an answer that is cut there is whole.
        reference_column: what a response is compared with; null: the ground truth.
        labels: what the model calls the first and the second answer; different first tokens.
    """

    template: str = PAIRWISE_TEMPLATE
    choices: Mapping[str, Status | float] | None = dataclasses.field(init=False)
    max_tokens: int = dataclasses.field(default=1, init=False)
    reference_column: str | None = None
    labels: Sequence[str] = ("A", "B")

    def __post_init__(self) -> None:
        labels = self.labels
        are_texts = all(isinstance(label, str) and label for label in labels)
        if not are_texts or len(labels) != 2 or len(set(labels)) != 2:
            raise ConfigError(
                f"pairwise: labels={labels!r} must be two different texts, such as [A, B]"
            )
        self._first, self._second = labels
        self.choices = {self._first: 1.0, self._second: 0.0}
        super().__post_init__()

    _needed: ClassVar[tuple[tuple[str, ...], ...]] = (("a",), ("b",))
    _given: ClassVar[frozenset[str]] = frozenset({"prompt", "a", "b", "mark"})

    def _body(self) -> dict[str, Any]:
        return {**super()._body(), "logprobs": MOST_LIKELY_TOKENS}

    def score(self, responses: Sequence[str], problems: Sequence[Problem]) -> Iterator[Verdict]:
        """Ask twice about each response, all at once; see RunningVerifier."""
        prompts = []
        for response, problem in zip(responses, problems):
            reference, response = self._reference(problem), self._end_of(response)
            prompts.append(filled(self._template, problem, a=response, b=reference))
            prompts.append(filled(self._template, problem, a=reference, b=response))
        answers = self._endpoint.ask(prompts)
        return map(self._of_both, answers, answers)  # Two answers a response, from one iterator.

    def _of_both(self, first: Answer, second: Answer) -> Verdict:
        if problem := first.problem or second.problem:
            return self._failed(problem)
        wins = self._wins(first), self._wins(second)
        if wins[0] is None or wins[1] is None:
            labels = f"{self._first} nor {self._second}"
            return self._failed(f"neither {labels} is among its most likely first tokens")
        score = (wins[0] + 1 - wins[1]) / 2
        note = f"wins with {wins[0]:.2f} as {self._first}, {1 - wins[1]:.2f} as {self._second}"
        return self._scored(score, note)

    def _wins(self, answer: Answer) -> float | None:
        """Return the probability that the first answer is better; None: the model named neither."""
        # A token may begin with the space before the label; both forms are the label.
        total = {label: 0.0 for label in (self._first, self._second)}
        for token, logprob in answer.first_token.items():
            if token.strip() in total:
                total[token.strip()] += math.exp(min(0.0, logprob))
        both = total[self._first] + total[self._second]
        return total[self._first] / both if both > 0 else None

    def _reference(self, problem: Problem) -> str:
        if self.reference_column is None:
            return problem.answer
        return str(problem.metadata[self.reference_column])

    def unusable(self, problems: Sequence[Problem]) -> dict[int, str]:
        """Return the problems that lack a reference, or what the template names."""
        column, reasons = self.reference_column, super().unusable(problems)
        for i, problem in enumerate(problems):
            found = problem.answer if column is None else problem.metadata.get(column)
            if found in (None, ""):
                reasons[i] = f"has no {column or 'ground truth'}, which responses are compared with"
        return reasons


def _check_choices(choices: Mapping[str, Status | float]) -> None:
    for choice, meaning in choices.items():
        is_number = (
            isinstance(meaning, int | float)
            and not isinstance(meaning, bool)
            and math.isfinite(meaning)
        )
        if not (isinstance(choice, str) and choice and (is_number or meaning in get_args(Status))):
            raise ConfigError(
                f"judge: choices.{choice}={meaning!r} must be a text with one of "
                f"{', '.join(get_args(Status))}, or a number as its meaning; change it"
            )

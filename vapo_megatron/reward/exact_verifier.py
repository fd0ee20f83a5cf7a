"""The verifier `exact`: a text, a letter, a regular expression, or JSON.

It runs in the killable processes of isolated.py: a regular expression that never ends costs one
verdict.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vapo_megatron.data.ground_truths import members
from vapo_megatron.reward.extraction import MAX_ANSWER_CHARACTERS, final_answer
from vapo_megatron.reward.fenced import last_block
from vapo_megatron.reward.verifier import Problem, Verdict

KINDS = ("text", "choice", "regex", "json")

_IN_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\s?\{([^{}]*)\}")
# What follows a letter to say why: it names other letters without choosing them.
_REASON = re.compile(
    r"[\s,.;:()*_-]+(?:(?i:because|since|as|for|due to|given|which|while|the reason|reason(?:ing)?"
    r"|explanation)\b|\u56e0\u4e3a|\u7531\u4e8e|\u7406\u7531).*",
    re.DOTALL,
)
_OUTER = " \t\n*_`\"'.,;:!?$\u201c\u201d\u2018\u2019"


class ExactVerifier:
    """A Verifier.

    Args:
        kind: one of KINDS, for rows without a column `kind`.
        letters: of a choice.
        schema: JSON Schema, for rows without a column `schema`; None: any JSON.
    """

    def __init__(
        self, kind: str = "text", letters: str = "ABCDE", schema: Mapping[str, Any] | None = None
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} must be one of {', '.join(KINDS)}")
        if not (letters.isascii() and letters.isalpha() and letters.isupper()):
            raise ValueError(f"letters={letters!r} must be capital letters, such as ABCDE")
        self._kind = kind
        self._schema = schema
        if schema is not None and (reason := _schema_mistake(schema)):
            raise ValueError(f"schema={schema!r} {reason}")
        self._letters = letters
        one = f"[{letters}]"
        # A letter that begins an answer; a small one only where nothing but a mark follows.
        self._named = re.compile(
            r"\W{0,8}(?:(?i:(?:the )?(?:correct |final )?(?:answer|option|choice)(?: is)?)\W{1,8})?"
            rf"(?:({one})(?![\w'])|({one.lower()})(?=\s?[).:\]]|\s*$))"
        )
        # What names a second one behind it.
        self._second = re.compile(
            rf"\W{{0,4}}(?:(?:\b(?:and|or)\b|[,;/&+|])\W{{0,4}})+{one}(?![\w'])"
            rf"|\W{{0,8}}{one}\W{{0,8}}$|.*\({one}\)"
        )
        self._mentioned = re.compile(
            rf"\(({one})\)|\b(?i:answer|option|choice)(?: is)?:? ?\W{{0,3}}({one})(?![\w'])"
            rf"|^[^\w\n]{{0,8}}({one})[^\w\n]{{0,8}}(?:$|(?i:because|since)\b|\u56e0\u4e3a)"
            rf"|\*\*\(?({one})(?:[.):][^*\n]{{0,200}})?\*\*"
            rf"|\u9009[\u62e9\u9879:]?[ *(]{{0,3}}({one})(?![A-Za-z])",
            re.MULTILINE,
        )

    def check(self, problem: Problem) -> str | None:
        """Return why a problem cannot be judged, or None."""
        kind = self._kind_of(problem)
        if kind not in KINDS:
            return f"has kind={kind!r}, which is none of {', '.join(KINDS)}"
        reason = getattr(self, f"_check_{kind}")(problem)
        if reason is None and kind in ("text", "choice", "json") and problem.answer:
            return self._check_itself(problem)
        return reason

    def _check_itself(self, problem: Problem) -> str | None:
        """Return what is wrong if the ground truth, as a response's answer, is not correct."""
        forms = ("Answer: {}", "\\boxed{{{}}}", "```json\n{}\n```")
        responses = [form.format(problem.answer) for form in forms]
        verdicts = self.score(responses, [problem] * len(forms))
        if any(verdict.is_correct for verdict in verdicts):
            return None
        note = f" ({verdicts[-1].note})" if verdicts[-1].note else ""
        return f"has the answer {problem.answer!r:.80}, which is not judged correct itself{note}"

    def score(self, responses: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        """Judge; see Verifier."""
        return [
            getattr(self, f"_judge_{self._kind_of(problem)}")(response, problem)
            for response, problem in zip(responses, problems, strict=True)
        ]

    def _kind_of(self, problem: Problem) -> str:
        return str(problem.metadata.get("kind") or self._kind)

    def _check_text(self, problem: Problem) -> str | None:
        try:
            golds = _gold_texts(problem)
        except ValueError as error:
            return f"has the answer {problem.answer!r:.80}, which {error}"
        if not all(0 < len(gold) <= MAX_ANSWER_CHARACTERS for gold in golds):
            return (
                f"has the answer {problem.answer!r:.80}, which is empty or over "
                f"{MAX_ANSWER_CHARACTERS} characters"
            )
        return None

    def _judge_text(self, response: str, problem: Problem) -> Verdict:
        found = list(_final_texts(response, normal))
        if not found:
            return Verdict("unparsable", note="no final answer")
        golds = _gold_texts(problem)
        is_correct = any(gold in found for gold in golds)
        return Verdict(
            "correct" if is_correct else "wrong", answer=golds[0] if is_correct else found[0]
        )

    def _check_choice(self, problem: Problem) -> str | None:
        if self._gold_letter(problem) is None:
            return f"has the answer {problem.answer!r:.80}, which is no letter of {self._letters}"
        return None

    def _judge_choice(self, response: str, problem: Problem) -> Verdict:
        if not response.isascii():
            response = unicodedata.normalize("NFKC", response)
        marked = final_answer(response, _bare, whole_line=True)
        if marked is not None:
            letter = self._letter(marked)
        else:
            letter = None
            for match in self._mentioned.finditer(response):
                letter = match[match.lastindex or 0]
        if letter is None:
            return Verdict("unparsable", note="no single letter is named")
        is_correct = letter == self._gold_letter(problem)
        return Verdict("correct" if is_correct else "wrong", answer=letter)

    def _gold_letter(self, problem: Problem) -> str | None:
        try:
            return self._letter(_unpacked(problem.answer))
        except ValueError:
            return None

    def _letter(self, answer: str) -> str | None:
        """Return the only letter that an answer names, or None."""
        answer = _REASON.sub("", answer)
        named = self._named.match(answer)
        if named is None or self._second.match(answer, named.end()):
            return None
        return (named[1] or named[2]).upper()

    def _check_regex(self, problem: Problem) -> str | None:
        try:
            re.compile(problem.answer)
        except (re.error, RecursionError, OverflowError) as error:
            return f"has the answer {problem.answer!r:.80}, no regular expression: {error}"
        return None if problem.answer else "has no regular expression as its answer"

    def _judge_regex(self, response: str, problem: Problem) -> Verdict:
        found = list(_final_texts(response, str.strip))
        if not found:
            return Verdict("unparsable", note="no final answer")
        expression = re.compile(problem.answer)
        matching = [text for text in found if expression.fullmatch(text)]
        return Verdict("correct" if matching else "wrong", answer=(matching or found)[0])

    def _check_json(self, problem: Problem) -> str | None:
        try:
            schema = self._schema_of(problem)
            if problem.answer:
                _read_json(problem.answer)
        except (ValueError, RecursionError) as error:
            return f"has a schema or an answer that is no JSON: {error}"
        if schema is None:
            return None if problem.answer else "has neither a schema nor an answer"
        reason = _schema_mistake(schema)
        return reason and f"has a schema that {reason}"

    def _judge_json(self, response: str, problem: Problem) -> Verdict:
        text = last_block(response, ("json",))
        if text is None:
            text = final_answer(response, str.strip, whole_line=True) or response
        try:
            value = _read_json(text)
        except (ValueError, RecursionError) as error:
            return Verdict("unparsable", note=f"no JSON: {error}")
        compact = json.dumps(value, sort_keys=True)
        answer = compact if len(compact) <= MAX_ANSWER_CHARACTERS else None
        schema = self._schema_of(problem)
        if schema is not None:
            mistake = next(_validator(schema).iter_errors(value), None)
            if mistake is not None:
                return Verdict("wrong", answer=answer, note=mistake.message[:200])
        if problem.answer and not _same_json(value, _read_json(problem.answer)):
            return Verdict("wrong", answer=answer, note="another value")
        return Verdict("correct", answer=answer)

    def _schema_of(self, problem: Problem) -> Any:
        schema = problem.metadata.get("schema")
        if schema is None:
            return self._schema
        return _read_json(schema) if isinstance(schema, str) else schema


def normal(text: str) -> str:
    """Return a text as it is compared: without case, spacing, emphasis, outer punctuation."""
    return " ".join(unicodedata.normalize("NFKC", _bare(text)).casefold().split()).strip(_OUTER)


def _bare(text: str) -> str:
    return _IN_TEXT.sub(r"\1", text).strip(_OUTER)


def _gold_texts(problem: Problem) -> list[str]:
    """Return what is correct: the ground truth, out of the list or dict that it may be in."""
    texts = dict.fromkeys((_unpacked(problem.answer), problem.answer))
    return [final_answer(text, normal, whole_line=True) or normal(text) for text in texts]


def _unpacked(answer: str) -> str:
    """Return the one text that a ground truth holds. ValueError: it holds several."""
    found = members(answer)
    if len(found) > 1:
        raise ValueError(
            f"lists {len(found)} texts, of which one can be compared; kind=json compares lists, "
            "kind=regex has alternatives"
        )
    return found[0]


def _final_texts(response: str, tidy: Any) -> Iterator[str]:
    """Yield what may be meant as the final answer: after a marker, or the whole response."""
    marked = final_answer(response, tidy)
    if marked is not None:
        yield marked
        # Not all full stops end a sentence: J. R. R. Tolkien.
        yield final_answer(response, tidy, whole_line=True) or marked
    elif 0 < len(whole := tidy(response)) <= MAX_ANSWER_CHARACTERS:
        yield whole


def _read_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def _same_json(first: Any, second: Any) -> bool:
    """Return whether two values are equal as JSON, where true is not 1."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _same_json(first[key], second[key]) for key in first
        )
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_same_json, first, second))
    return first == second and isinstance(first, bool) == isinstance(second, bool)


def _validator(schema: Any) -> Any:
    import jsonschema

    return jsonschema.validators.validator_for(schema)(schema)


def _schema_mistake(schema: Any) -> str | None:
    """Return what is wrong with a schema, to be read after "the schema", or None."""
    import jsonschema

    for reference in _references(schema):
        # jsonschema would fetch it.
        if not reference.startswith("#"):
            return f"refers to another document, {reference!r}; include it"
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        return f"is no JSON Schema: {error.message[:200]}"
    return None


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            yield from _references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _references(item)

"""Texts, letters, expressions and JSON. Not exercised: every language's letters and quotes."""

import json

import pytest

from tests.reward import limits
from vapo_megatron.config import RewardConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.reward.exact_verifier import ExactVerifier
from vapo_megatron.reward.fenced import last_block
from vapo_megatron.reward.verifier import Problem
from vapo_megatron.reward.verifiers import Verifiers

SCHEMA = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/small"}},
    "required": ["n"],
    "$defs": {"small": {"type": "integer", "maximum": 9}},
}


def judged(default, response, answer, **columns):
    (verdict,) = ExactVerifier(default).score([response], [Problem("", answer, columns)])
    return verdict


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so it is\nAnswer: Paris.", "paris"),
        ("Answer: Paris. It is in France.", "Paris"),
        ("Answer: J. R. R. Tolkien", "J. R. R. Tolkien"),
        (r"\boxed{\text{New  York}}", "new york"),
        ("**Answer:** **Paris**", "Paris"),
        ("#### \uff30aris", "Paris"),
        (" Paris\n", "Paris"),
        ("Answer: five apples", "#### Five apples"),
        ("Answer: C++", "c++"),
        (r"\boxed{3 \text{ cats}}", "3 cats"),
        ("Answer: Paris", '["Paris"]'),
        ("Answer: 42", "{'answer': 42}"),
        ("Answer: [42]", "[42]"),
        ("Answer: 42", "[42]"),
    ],
)
def test_texts_that_are_equal(response, answer):
    assert judged("text", response, answer).is_correct


@pytest.mark.parametrize(
    ("response", "answer", "status"),
    [
        ("Answer: London\nI mean Paris", "Paris", "wrong"),
        ("Answer: Paris or London", "Paris", "wrong"),
        ("Paris is my answer", "Paris", "wrong"),
        ("Answer: Paris\nAnswer: London", "Paris", "wrong"),
        ("Answer: 5 dogs", "5 cats", "wrong"),
        ("Answer: C", "C++", "wrong"),
        ("", "Paris", "unparsable"),
        ("Paris " * 400, "Paris", "unparsable"),
    ],
)
def test_texts_that_are_not(response, answer, status):
    assert judged("text", response, answer).status == status


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{B}", "Answer: B", "Answer: (B)", "Answer: **B**", "Answer: B. A cat", "Answer: b",
        "Answer: (b) Paris", r"\boxed{\text{B}}", "Answer: The correct answer is B.",
        "Answer: option B", "First (A), then no: (B)", "The answer is B", "We see it.\nB\n",
        "I choose option B, because A is wrong", "#### B)", "Answer: B, because of C",
        "(A) was my guess. Answer: B", "Not Answer: A\n\\boxed{B}",
        "\u7b54\u6848\uff1aB", "\u6240\u4ee5\u7b54\u6848\u662fB\u3002", "\u7b54\u6848\u4e3a (B)",
        "**\u7b54\u6848\uff1aB**",
        "\u6b63\u786e\u7b54\u6848\uff1a**B**", "\u7b54\u6848\uff1a\uff08B\uff09",
        "\u7b54\u6848\uff1a\uff22", "\u6545\u9009\uff1aB\u3002",
        "\u7b54\u6848\uff1aB\uff0c\u56e0\u4e3aA\u4e0d\u5bf9", "**B**",
        "The answer is **B**.", "I pick **B. Paris** here",
        "Answer: B, because A and C are too small", "Answer: B, because (A) is wrong",
        "Answer: B (because A is wrong)", "Answer: **B** \u2014 because C is off",
        "Answer: B since option A fails", "Answer: (B) because (C) fails", "B. because A is wrong",
        "**B.** because A is wrong", "\\boxed{B}, because A is wrong",
    ],
)  # fmt: skip
def test_the_letter_that_is_named_last(response):
    verdict = judged("choice", response, "(B)")
    assert (verdict.status, verdict.answer) == ("correct", "B")
    assert judged("choice", response, "C").status == "wrong"


@pytest.mark.parametrize(
    "response",
    [
        "Answer: A or B", "Answer: A, B", r"\boxed{A, B, C, D, E}", "Answer: (A) (B)",
        "Answer: A/B", "Answer: A and B", "Answer: AB", "Answer: B; C", "Answer: B & C",
        "Answer: Bees", "Answer: F", "Answer: none", "Answer: not B", "B or not",
        "A Bee is an insect", "", "\\boxed{B", "Answer:", "Answer: B (C)", "Answer: a bee",
        "\u7b54\u6848\uff1aA\u6216B", "\u7b54\u6848\uff1aA\u3001B", "\u7b54\u6848\uff1aA\uff0cB",
        "\u7b54\u6848\uff1a", "\\boxed{A}, \\boxed{B}",
        "Answer: A or B, because both hold", "Answer: because B is wrong",
        "Answer: none, because B is wrong", "Answer: A/B because of C",
    ],
)  # fmt: skip
def test_no_single_letter(response):
    assert judged("choice", response, "B").status == "unparsable"


def test_letters_beyond_e():
    problem = Problem("", "J")
    reason = "has the answer 'J', which is no letter of ABCDE"
    assert ExactVerifier("choice").check(problem) == reason
    ten = ExactVerifier("choice", letters="ABCDEFGHIJ")
    assert ten.check(problem) is None and ten.score(["Answer: J"], [problem])[0].is_correct


@pytest.mark.parametrize(
    ("response", "pattern", "status"),
    [
        ("Answer: 2024-01-31", r"\d{4}-\d\d-\d\d", "correct"),
        ("Answer: on 2024-01-31", r"\d{4}-\d\d-\d\d", "wrong"),
        (r"\boxed{colour}", "colou?r", "correct"),
        ("color", "colou?r", "correct"),
        ("Answer: COLOR", "(?i)colou?r", "correct"),
        ("Answer: COLOR", "colou?r", "wrong"),
        ("", ".*", "unparsable"),
    ],
)
def test_regular_expressions_match_the_whole_answer(response, pattern, status):
    assert judged("regex", response, pattern).status == status


@pytest.mark.parametrize(
    ("response", "answer", "status"),
    [
        ('so\n```json\n{"n": 3}\n```', "", "correct"),
        ('{"n": 3}', '{"n": 3.0}', "correct"),
        ('Answer: {"n": 3, "m": [1, null]}', '{"m": [1, null], "n": 3}', "correct"),
        ('{"n": 3}', '{"n": 4}', "wrong"),
        ('{"n": 12}', "", "wrong"),
        ('{"n": true}', '{"n": 1}', "wrong"),
        ('{"m": 3}', "", "wrong"),
        ("[3]", "", "wrong"),
        ('{"n": 3', "", "unparsable"),
        ('{"n": NaN}', "", "unparsable"),
        ("[" * 100_000, "", "unparsable"),
        ("three", "", "unparsable"),
    ],
)
def test_json(response, answer, status):
    assert judged("json", response, answer, schema=json.dumps(SCHEMA)).status == status


def test_json_without_a_schema_is_compared():
    assert judged("json", "[1, true]", "[1.0, true]").is_correct
    assert not judged("json", "[true, 1]", "[1, 1]").is_correct


def test_a_row_chooses_its_kind():
    assert judged("text", "Answer: B or b", "B|C", kind="regex").status == "wrong"
    assert judged("regex", "Answer: (b)", "B", kind="choice").is_correct
    assert judged("choice", "Answer: 7", "7", kind=None).status == "unparsable"


@pytest.mark.parametrize(
    ("kind", "answer", "columns", "reason"),
    [
        ("text", " ?! ", {}, "which is empty or over 1000 characters"),
        ("text", "a", {"kind": "number"}, "has kind='number', which is none of text, choice, "),
        ("text", '["a", "b"]', {}, "which lists 2 texts, of which one .*kind=json"),
        ("text", "{'x': 1}", {}, "which is a dict with the keys x"),
        ("text", "a}\nb", {}, "which is not judged correct itself"),
        ("choice", '["A", "B"]', {}, "which is no letter"),
        ("json", '{"n": 10}', {"schema": SCHEMA}, "not judged correct itself .10 is greater"),
        ("choice", "F", {}, "has the answer 'F', which is no letter of ABCDE"),
        ("choice", "A or B", {}, "which is no letter"),
        ("regex", "(a", {}, r"no regular expression: missing \), unterminated subpattern"),
        ("regex", "a{99999999999}", {}, "the repetition number is too large"),
        ("regex", "", {}, "has no regular expression"),
        ("json", "", {}, "has neither a schema nor an answer"),
        ("json", "{", {}, "has a schema or an answer that is no JSON"),
        ("json", "", {"schema": "{"}, "has a schema or an answer that is no JSON"),
        ("json", "", {"schema": {"type": "whole"}}, "has a schema that is no JSON Schema"),
        ("json", "", {"schema": {"$ref": "http://a.example/b"}}, "refers to another document"),
        ("json", "", {"schema": {"items": [{"$ref": "b#"}]}}, "refers to another document, 'b#'"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_judged_are_refused(kind, answer, columns, reason):
    problem = Problem("", answer, columns)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(ExactVerifier(kind).check(problem))


def test_rows_that_can_are_not():
    good = [("text", "Paris"), ("choice", '["E"]'), ("regex", "a+"), ("json", "[]")]
    assert [ExactVerifier(kind).check(Problem("", answer)) for kind, answer in good] == [None] * 4


def test_through_the_processes_one_endless_expression_costs_one_verdict(monkeypatch):
    reward = RewardConfig(
        verifier="exact",
        verifiers={"exact": {"kind": "regex"}, "mcq": {"use": "exact", "kind": "choice"}},
        num_workers=1,
        timeout_seconds=60.0,
    )
    limits.limit(monkeypatch, 0.5, "(a+)+b")
    problems = [Problem("", "a+b"), Problem("", "(a+)+b"), Problem("", "B", {"verifier": "mcq"})]
    with Verifiers(reward) as verifiers:
        found = verifiers.score(["Answer: aab", "a" * 60, "(B)"], problems)
        assert [v.status for v in found] == ["correct", "timed_out", "correct"]
        assert verifiers.unusable([Problem("", "("), problems[0]]) == {
            0: "is refused by the verifier exact: has the answer '(', no regular expression: "
            "missing ), unterminated subpattern at position 0"
        }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "number"}, "ValueError: kind='number' must be one of text, choice, regex, json"),
        ({"letters": "a-z"}, "ValueError: letters='a-z' must be capital letters"),
        ({"schema": {"type": 3}}, "is no JSON Schema"),
        ({"tolerance": 1}, "exact.tolerance is no option of exact, which has kind"),
    ],
)  # fmt: skip
def test_options_that_are_wrong(options, message):
    reward = RewardConfig(verifiers={"exact": options}, num_workers=1)
    with Verifiers(reward) as verifiers, pytest.raises(ConfigError, match=message):
        verifiers.load()


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\n1\n```\n```py\n2\n```", "2"),
        ("```python\n1\n```\n```\n2\n```", "1"),
        ("```python\n1\n```\n```sh\n2\n```", "1"),
        ("```\n1\n```", "1"),
        ("```Python title\n1\n\n  2\n```", "1\n\n  2"),
        ("  ```python\n  if 1:\n    2\n  ```", "if 1:\n  2"),
        ("````python\n```\n1\n````", "```\n1"),
        ("```python\n1\n```\n```python\n2", "1"),
        ("```python\n1", None),
        ("``` 1 ``` and ```x```", None),
        ("```sh\n1\n```", None),
        ("```python\n```", ""),
        ("", None),
    ],
)
def test_the_last_block(text, block):
    assert last_block(text, ("python", "py")) == block

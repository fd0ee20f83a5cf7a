"""Verdicts of `math` over pairs of ground truth and response, through real workers.

`math_cases.jsonl` has right and nearly right answers with what is wanted: from bug reports of other
people, and our own of the same kinds (`own`). `math_ordinary.jsonl` has 800 drawn pairs with the
verdicts of math-verify 0.9 alone. Not exercised: responses that hang.
"""

import collections
from pathlib import Path

import pytest

from tests import jsonl
from vapo_megatron.reward.math_verifier import MathVerifier

FOLDER = Path(__file__).parent


def rows(name):
    return jsonl.read(FOLDER / f"{name}.jsonl")


CASES, ORDINARY = rows("math_cases"), rows("math_ordinary")


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier(2, 60.0) as running:
        yield running


def statuses(verifier, pairs):
    """Of each pair; "refused" where the ground truth cannot be used."""
    refused = set(verifier.unparsable_answers([pair["gold"] for pair in pairs]))
    asked = [i for i in range(len(pairs)) if i not in refused]
    verdicts = verifier.score(
        [pairs[i]["response"] for i in asked], [pairs[i]["gold"] for i in asked]
    )
    found = ["refused"] * len(pairs)
    for i, verdict in zip(asked, verdicts):
        found[i] = verdict.status
    return found


def of_kinds(pairs):
    found = collections.defaultdict(list)
    for pair in pairs:
        found[pair["kind"]].append(pair)
    return [pytest.param(group, id=kind[:40]) for kind, group in found.items()]


@pytest.mark.parametrize("pairs", of_kinds(CASES))
def test_a_kind_of_answers(verifier, pairs):
    allowed = {"correct": {"correct"}, "not correct": {"wrong", "unparsable"}}
    wrong = [
        (status, pair["gold"], pair["response"], pair["wanted"])
        for pair, status in zip(pairs, statuses(verifier, pairs))
        if status not in allowed[pair["wanted"]]
    ]
    assert wrong == []


@pytest.mark.parametrize("pairs", of_kinds(ORDINARY))
def test_ordinary_answers_are_judged_as_math_verify_judges_them(verifier, pairs):
    wrong = [
        (status, pair["gold"], pair["response"], pair["wanted"])
        for pair, status in zip(pairs, statuses(verifier, pairs))
        if status != pair["wanted"]
    ]
    assert wrong == []


def test_there_are_enough_of_both():
    wanted = collections.Counter(pair["wanted"] for pair in CASES)
    assert min(wanted.values()) >= 500 and len(ORDINARY) == 800
    assert sum(not pair.get("own") for pair in CASES) == 104
    print(f"{len(CASES)} cases: {dict(wanted)}; {len(ORDINARY)} ordinary pairs")

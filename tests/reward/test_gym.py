"""The verifier reasoning_gym: a task's own scorer, whose faults cost one verdict each.

Not exercised: scores of tasks outside the table (tests/cli/prepare/test_prepare_gym.py makes more).
"""

import fractions
import json
import pathlib

import pytest

from tests.alone import loaded_by, printed_by
from tests.reward import limits
from vapo_megatron.config import RewardConfig
from vapo_megatron.errors import ConfigError
from vapo_megatron.reward import gym
from vapo_megatron.reward.columns import columns_read
from vapo_megatron.reward.gym_verifier import FORMS, find_answer
from vapo_megatron.reward.isolated import IsolatedVerifier
from vapo_megatron.reward.shaping import scored_verdict, shaped_reward
from vapo_megatron.reward.verifier import Problem
from vapo_megatron.reward.verifiers import Verifiers
from vapo_megatron.sandbox.pool import WorkerPool

SMALL = {
    "chain_sum": {"max_terms": 2, "max_digits": 1},
    "products": {"max_digits": 1},
    "lcm": {"max_value": 10},
    "gcd": {"max_value": 20},
    "letter_counting": {"min_words": 2, "max_words": 3},
    "count_bits": {"max_n": 15},
    "fraction_simplification": {"max_value": 20, "max_factor": 3, "styles": ["plain"]},
    "simple_equations": {"max_value": 9},
    "maze": {"max_grid_size": 5, "max_dist": 5},
    "syllogism": {"allow_some": False},
    "isomorphic_strings": {"max_string_length": 4},
    "aiw": {"max_entities": 3},
    "prime_factorization": {"max_value": 30},
}
PER_TASK = 12
GARBAGE = ("I do not know", "1/0", "([{, \u221e", "9" * 2000)
RAISE_ON_TEXT = {"prime_factorization"}
"""Their scorers raise on text that is no number."""


@pytest.fixture(scope="module")
def made():
    """Problems by (task, its settings as JSON)."""
    pool = WorkerPool("vapo_megatron.cli.prepare.gym_worker:make_handler", {}, 1, 600, 8 * 10**9)
    asked = {(task, json.dumps(c)): c for task in SMALL for c in ({}, SMALL[task])}
    requests = [
        {"task": task, "config": config, "stream": task, "first": 0, "count": PER_TASK}
        for (task, _), config in asked.items()
    ]
    try:
        return {key: reply["problems"] for key, reply in zip(asked, pool.run(requests))}
    finally:
        pool.close()


@pytest.fixture(scope="module")
def verifiers():
    config = RewardConfig(verifier="reasoning_gym", num_workers=1, timeout_seconds=600)
    with Verifiers(config) as running:
        yield running


def problem(made):
    return Problem(made["question"], made["answer"], {"reasoning_gym": made["row"]})


@pytest.mark.parametrize("task", SMALL)
def test_right_is_one_wrong_is_less_and_garbage_costs_one_verdict(task, made, verifiers):
    for config in ({}, SMALL[task]):
        found = made[task, json.dumps(config)]
        assert [m["reason"] for m in found] == [None] * PER_TASK
        assert json.loads(found[0]["row"])["config"] == config
        problems = [problem(m) for m in found]
        assert verifiers.unusable(problems) == {}
        for form in (*FORMS, "So it is \\boxed{{{}}}."):
            right = list(verifiers.score([form.format(p.answer) for p in problems], problems))
            assert [(v.status, v.score) for v in right] == [("correct", 1.0)] * PER_TASK
        others = [
            next((o.answer for o in problems if o.answer != p.answer), "99") for p in problems
        ]
        wrong = list(verifiers.score([f"Answer: {other}" for other in others], problems))
        assert {v.status for v in wrong} == {"wrong"} and all(v.score < 1 for v in wrong)
        assert [v.answer for v in wrong] == [find_answer(f"Answer: {o}") for o in others]
        asked = [f"Answer: {text}" for text in GARBAGE] + ["Answer: " + problems[0].answer, "none"]
        verdicts = list(verifiers.score(asked, problems[:1] * len(asked)))
        *bad, good, silent = [v.status for v in verdicts]
        assert good == "correct" and silent == "unparsable"
        assert set(bad) <= ({"failed", "wrong"} if task in RAISE_ON_TEXT else {"wrong"})
        assert ("failed" in bad) == (task in RAISE_ON_TEXT)


def test_a_score_is_kept_while_correct_is_counted_apart(made, verifiers):
    """A chain_sum's scorer gives an answer's share of the text: 1/2 for "7 x" or "17 xy"."""
    [first, *_] = made["chain_sum", "{}"]
    answer = first["answer"]
    partial = f"Answer: {answer} {'x' * (len(answer) - 1)}"
    responses = [partial, f"Answer: {answer}"]
    verdicts = list(verifiers.score(responses, [problem(first)] * 2))
    assert [(v.status, v.score) for v in verdicts] == [("wrong", 0.5), ("correct", 1.0)]
    for fields, correct, rewards in (
        ({}, [False, True], [-1, 1]),
        ({"from_score": [0, 1]}, [False, True], [0.5, 1]),
        ({"from_score": [0, 1], "correct_from": 0.4}, [True, True], [0.5, 1]),
    ):
        reward = RewardConfig(verifier="reasoning_gym", **fields)
        judged = [scored_verdict(v, reward, "reasoning_gym") for v in verdicts]
        assert [v.is_correct for v in judged] == correct
        found = [shaped_reward(v, False, 5, reward, 100, "reasoning_gym") for v in judged]
        assert found == rewards


@pytest.fixture(scope="module")
def started():
    options = {"correct_from": 0.5}
    verifier = IsolatedVerifier(
        "reasoning_gym", "tests.reward.own_gym:Verifier", options,
        num_workers=1, timeout_seconds=60, memory_bytes=2 * 10**9,
    )  # fmt: skip
    yield verifier
    verifier.close()


def row(answer="7", task="stand_in", config=(), **metadata):
    entry = {"question": "w7", "answer": answer, "metadata": {"n": (7,), **metadata}}
    return Problem("w7", answer or "", {
        "reasoning_gym": gym.write_row(gym.Row(task, dict(config), entry))
    })  # fmt: skip


def test_a_scorer_that_misbehaves_costs_one_verdict(started, monkeypatch, capfd):
    limits.limit(monkeypatch, 1.0, "hang")
    expected = {
        "7": ("correct", 1.0, ""),
        "hang": ("timed_out", None, "more than 60 seconds"),
        "raise": ("failed", None, "RuntimeError: no such answer"),
        "nan": ("failed", None,
                "TypeError: score_answer of stand_in returned nan, no finite number"),
        "text": ("failed", None,
                 "TypeError: score_answer of stand_in returned '1.0', no finite number"),
        "none": ("failed", None,
                 "TypeError: score_answer of stand_in returned None, no finite number"),
        "numpy": ("correct", 1.0, ""),
        "half": ("correct", 0.5, ""),
        "true": ("correct", 1.0, ""),
        "8": ("wrong", 0.0, ""),
    }  # fmt: skip
    verdicts = started.score([f"Answer: {text}" for text in expected], [row()] * len(expected))
    assert [(v.status, v.score, v.note) for v in verdicts] == list(expected.values())
    assert capfd.readouterr().err.count("warning: ") == 1


def test_rows_that_cannot_be_judged_are_named(started):
    written = json.loads(row().metadata["reasoning_gym"])
    rows = {
        "": row(),
        " ": row(answer=None),  # Of a task that gives none.
        "has no column reasoning_gym": Problem("w7", "7"),
        "is no task, config and entry: KeyError('config')": Problem(
            "w7", "7", {"reasoning_gym": '{"task": "stand_in"}'}
        ),
        "is no task, config and entry: JSONDecodeError": Problem("w7", "7", {"reasoning_gym": "x"}),
        "'nobody', which its task stand_in does not score as correct": row(answer="nobody"),
        "'hop' is no task of reasoning_gym": row(task="hop"),
        "stand_in has no setting size; it has distinct, every_wrong, kind": row(config={"size": 3}),
        "RuntimeError: no such answer": row(answer="raise"),
    }
    found = started.unusable(list(rows.values()))
    for i, words in enumerate(rows):
        assert words.strip() in found.get(i, "") and bool(words.strip()) == (i in found)
    # A file may hold the object in place of its text.
    assert started.unusable([Problem("w7", "7", {"reasoning_gym": written})]) == {}


def test_what_a_scorer_would_run_must_be_an_expression(started, tmp_path):
    """Some run answers with eval or sympy: only what computes is given to them."""
    mark = tmp_path / "mark"
    code = f"[__import__('pathlib').Path({str(mark)!r}).touch()]"
    hidden = "open(" + "+".join(f"chr({ord(c)})" for c in str(mark)) + "+chr(33),chr(119))"
    rows = {
        "binary_matrix": row("0 1", "binary_matrix"),
        "countdown": row("3 + 4", "countdown", numbers=[3, 4], target=7),
        "simple_integration": row("x**2 + C", "simple_integration", integrand="2*x", variable="x"),
    }
    assert started.unusable(list(rows.values())) == {}
    right = {"binary_matrix": "[[0, 1]]", "countdown": "(4 + 3)", "simple_integration": "x**2"}
    verdicts = started.score([f"Answer: {a}" for a in right.values()], list(rows.values()))
    assert [v.score for v in verdicts] == [0.1, 1.0, 1.0]
    for text in (code, hidden, code.replace("(", "\uff08"), "\uff45val(1)", "x.__class__"):
        for each in rows.values():
            [verdict] = started.score([f"<answer>{text}</answer>"], [each])
            assert (verdict.status, verdict.score) == ("wrong", 0.0) or verdict.score <= 0.01
    spoiled = row("x + C", "simple_integration", integrand=code, variable="x")
    assert "is no plain expression, so it is not run" in started.unusable([spoiled])[0]
    assert [v.status for v in started.score(["Answer: x"], [spoiled])] == ["failed"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("so <answer> 7 </answer>.", "7"),
        ("<answer>1 2\n3 4</answer>", "1 2\n3 4"),
        ("<answer>7</answer> no, <answer>8</answer>", "8"),
        ("<answer>7</answer>\nAnswer: 8", "8"),
        ("Answer: 8\n<answer>7</answer>", "7"),
        ("<answer>\\boxed{7}</answer>", "7"),
        ("<answer>Answer: 7</answer>", "7"),
        ("Answer: **7**.", "7"),
        ("answer: J. R. Ray", "J. R. Ray"),
        ("\\boxed{\\text{Yes}}", "Yes"),
        ("#### 7", "7"),
        ("Answer: 1\nAnswer: 2\nthen", "2"),
        ("<answer></answer>", None),
        ("<answer>7", None),
        ("</answer> 7 <answer>", None),
        ("it is\n7", None),
        ("<answer>" + "7" * 10_001 + "</answer>", None),
    ],
)
def test_the_last_marker_has_the_answer(response, expected):
    assert find_answer(response) == expected
    if "answer>" not in response.lower() and expected is None:
        assert find_answer(response + " \n", last_line=True) == "7"


def test_a_row_survives_json():
    metadata = {
        "graph": {1: (2, 3), 2: ()}, "seen": {4}, "share": {fractions.Fraction(1, 3): 1},
        "kind": {"of": pathlib.PurePosixPath("a")}, "none": None,
    }  # fmt: skip
    entry = {"question": "q", "answer": None, "metadata": metadata}
    found = gym.read_row(gym.write_row(gym.Row("t", {"a": [1]}, entry)))
    expected = {**metadata, "kind": str(metadata["kind"])}
    assert found == gym.Row("t", {"a": [1]}, {**entry, "metadata": expected})


def test_it_reads_its_own_column_alone():
    problem = Problem("p", "1", {"reasoning_gym": "{}", "level": 1, "verifier": "reasoning_gym"})
    assert columns_read(problem, RewardConfig()) == {"reasoning_gym", "verifier"}


def test_without_the_package_the_extra_is_named(monkeypatch):
    find = gym.importlib.util.find_spec
    monkeypatch.setattr(
        gym.importlib.util, "find_spec", lambda n: None if n == "reasoning_gym" else find(n)
    )
    with Verifiers(RewardConfig(verifier="reasoning_gym")) as running:
        with pytest.raises(ConfigError, match=r"pip install 'vapo-megatron\[reasoning-gym\]'"):
            running.load()


def test_the_package_is_not_imported_without_need():
    code = "import vapo_megatron.reward.verifiers, vapo_megatron.cli.prepare.command"
    assert loaded_by(code, ("reasoning_gym",)) == []


def test_a_package_that_one_task_needs_is_missed_by_that_task_alone():
    code = """
from vapo_megatron.reward import gym
find = gym.importlib.util.find_spec
gym.importlib.util.find_spec = lambda name: None if name in gym.NEEDED_BY else find(name)
import sys
tasks = gym.load()
try:
    gym.create("zebra_puzzles", {}, seed=0)
except ValueError as error:
    print("zebra_puzzles" in tasks, len(tasks) > 90, "pycosat" in sys.modules, error)
print(gym.create("chain_sum", {}, seed=0, size=1)[0]["question"][:5])
"""
    expected = "False True False 'zebra_puzzles' needs the package pycosat\nState"
    assert printed_by(code).strip() == expected

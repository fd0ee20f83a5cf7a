"""Who judges what under reward.verifier=hybrid, and that every rank knows it.

Not exercised: what the verifiers find correct; a whole run is in tests/test_hybrid_wiring.py.
"""

import functools

import pytest

from tests import jsonl
from vapo_megatron.config import RewardConfig
from vapo_megatron.errors import UserError
from vapo_megatron.reward.hybrid import choose, is_prose
from vapo_megatron.reward.reward_model import reward_model_refusals
from vapo_megatron.reward.verifier import Problem
from vapo_megatron.reward.verifiers import Verifiers

OWN = "tests.reward.own_verifiers"
REWARD = RewardConfig(
    num_workers=1,
    timeout_seconds=60.0,
    verifier="hybrid",
    hybrid=["tests", "letter", "math", "judge", "taste"],
    verifiers={
        "tests": {"use": "code"},
        "letter": {"use": "exact", "kind": "choice"},
        "judge": {"base_url": "http://127.0.0.1:1/v1", "model": "m"},
        "taste": {"use": "reward_model"},
    },
)
ROWS = [
    (Problem("add", "", {"tests": ["assert f(1) == 2"]}), "tests"),
    (Problem("which?", "B"), "letter"),
    (Problem("1+1", "2"), "math"),
    (Problem("half", r"\frac{1}{2}"), "math"),
    (Problem("capital", "Paris"), "judge"),
    (Problem("why", "Because light of short waves is scattered more."), "judge"),
    (Problem("write a poem"), "taste"),
    (Problem("2+2", "4", {"verifier": "exact"}), None),
    (Problem("3+3", "6", {"verifier": "hybrid"}), "math"),
]
"""Rows, and what hybrid chooses for them; None: they have a verifier of their own."""


def test_the_first_that_accepts_a_row_judges_it():
    problems = [problem for problem, _ in ROWS]
    expected = {i: name for i, (_, name) in enumerate(ROWS) if name is not None}
    with Verifiers(REWARD) as verifiers:
        assert verifiers.examine(problems, None) == (expected, {})
        # Where the reward model cannot judge, the row that is left for it is refused.
        refusal = reward_model_refusals(has_reward_model=True)[1]
        assert verifiers.examine(problems, refusal) == (expected, {6: refusal})
        # A row that names math itself is judged by it, as in a run of math alone.
        assert verifiers.unusable([Problem("", "Paris", {"verifier": "math"})]) == {}
    # Another order chooses others; a row that none accepts is refused, with what each says.
    reward = REWARD.model_copy(update={"hybrid": ["math", "tests"]})
    with Verifiers(reward) as verifiers:
        chosen, reasons = verifiers.examine(problems[:7], None)
    assert chosen == {0: "tests", 1: "math", 2: "math", 3: "math"}
    assert reasons.keys() == {4, 5, 6}
    assert reasons[4].startswith(
        "is judged by hybrid, but accepted by none of reward.hybrid=['math', 'tests']: "
        "math: it has the answer 'Paris', which is prose; tests: it "
    )
    assert "math: it has no ground truth; tests" in reasons[6]


def test_each_verifier_is_asked_once_of_what_is_left():
    asked = []

    def unusable(name, problems):
        asked.append((name, [p.prompt for p in problems]))
        return {
            i: "has no a" for i, p in enumerate(problems) if name == "exact" and "a" not in p.prompt
        }

    reward = RewardConfig(hybrid=["exact", "code"])
    problems = [Problem("b"), Problem("a"), Problem("c")]
    assert choose(problems, reward, unusable) == ({1: "exact", 0: "code", 2: "code"}, {})
    assert asked == [("exact", ["b", "a", "c"]), ("code", ["b", "c"])]
    chosen, reasons = choose(problems, RewardConfig(), unusable)
    assert chosen == {} and reasons[0].endswith("none of reward.hybrid=[]: it is empty")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("42", False), (r"\frac{1}{2}", False), ("(3, 4]", False), ("2xy + 1", False),
        ("12 km", False), (r"10\text{ cm}", False), (r"\sin(x) + cos x", False),
        (r"so it is \boxed{\pi}", False), ("words ... #### 42", False), ("x = 1 or x = 2", False),
        # Compared letter by letter, spaces and all.
        ("Paris", True), (r"\text{even}", True), ("yes", True), ("No", True),
        ("October 12, 1492", True), ("\u4e2d\u56fd\u4eba", True), ("George Washington", True),
    ],
)  # fmt: skip
def test_what_is_prose_is_no_mathematics(answer, expected):
    assert is_prose(answer) == expected


def started(files, reward, tp_size, **options):
    """The verifiers that each row of each file names on this rank, or what the user is told."""
    from vapo_megatron.data.mixture import Mixture
    from vapo_megatron.data.problems import load_problems
    from vapo_megatron.data.prompts import PromptDataset
    from vapo_megatron.reward.checks import start_verifiers

    made = [
        PromptDataset(
            load_problems(file), lambda text: [1], path=file.name, seed=0, shuffle=False,
            max_prompt_tokens=9, source=file.stem,
        )
        for file in files
    ]  # fmt: skip
    training, held_out = (
        Mixture({"a": made[0], "b": made[1]}, lambda step: {"a": 1, "b": 1}),
        made[2],
    )
    assert len(training.rows) == len(made[0]) + len(made[1])
    try:
        verifiers = start_verifiers(
            reward, training, held_out, tp_size, reward_hf_path="rm", **options
        )
    except UserError as error:
        return str(error)
    if verifiers is not None:
        verifiers.close()
    names = [[row.verifier for row in part.rows] for part in (training, *made)]
    assert [p.problem.verifier for p in made[2].problems] == [
        row.verifier for _, row in made[2].kept
    ]
    assert {p.problem.verifier for p in training.next(20, 0)} == set(names[0])
    return (names, training.left_out, made[2].left_out) if options else names


def write(path, rows):
    lines = [{"prompt": "p", "answer": answer} | more for answer, more in rows]
    jsonl.write(path, lines)
    return path


def test_every_rank_knows_every_choice(workers, tmp_path):
    """Each replica looks at its share of the rows alone."""
    poem, named = {"verifier": "taste"}, {"verifier": "exact"}
    files = [
        write(tmp_path / "a.jsonl", [("1", {}), ("Paris", {}), ("x", poem), ("y", named)]),
        write(tmp_path / "b.jsonl", [("Rome", {}), ("2", {}), ("3", {})]),
        write(tmp_path / "c.jsonl", [("4", {}), ("Oslo", {})]),
    ]
    reward = REWARD.model_copy(update={"hybrid": ["math", "judge"]})
    first, second = ["math", "judge", "taste", "exact"], ["judge", "math", "math"]
    expected = [first + second, first, second, ["math", "judge"]]
    assert workers.run(1, started, files, reward, 1) == [expected]
    assert workers.run(2, started, files, reward, 1) == [expected] * 2
    assert workers.run(2, started, files, reward, 2) == [expected] * 2
    # All rows of the training data are checked by others: the reward model is not needed.
    write(files[0], [("1", {}), ("Paris", {})])
    told = workers.run(2, started, files, REWARD, 1)
    assert told[0] == told[1] and told[0].startswith(
        "model.reward_hf_path=rm would score nothing: all rows of a.jsonl, b.jsonl are judged by "
        "judge, math; set reward.verifier=reward_model or"
    )
    write(files[2], [("4", {}), ("Oslo", {"verifier": "taste"})])
    told = workers.run(2, started, files, reward, 1)
    assert told[0] == told[1] and "c.jsonl: row 1 (from 0) is judged by reward_model" in told[0]
    # Left out on every rank, whichever looked at it.
    write(files[0], [("1", poem), ("Paris", {})])
    skipping = functools.partial(started, skip_unusable=True)
    told = workers.run(2, skipping, files, reward, 1)
    assert told[0] == told[1]
    _, of_training, of_held_out = told[0]
    assert of_training == {} and list(of_held_out) == [1]

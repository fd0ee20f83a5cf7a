"""Plain functions as verifiers, and the call with a made-up response before a run.

Not exercised: what a function may do to its process; test_isolated.py has that.
"""

import math
import types

import numpy as np
import pytest
import torch

from vapo_megatron.config import RewardConfig
from vapo_megatron.config.metrics import LABEL
from vapo_megatron.errors import ConfigError
from vapo_megatron.reward import verifier as verifier_module
from vapo_megatron.reward.functions import FunctionVerifier, WrongReturn
from vapo_megatron.reward.shaping import full_score, scored_verdict
from vapo_megatron.reward.user_code import load
from vapo_megatron.reward.verifier import Problem, Verdict
from vapo_megatron.reward.verifiers import Verifiers, default_name

ROW = Problem("2+4=", "6", {"tolerance": 1, "who": "a test"})


def judged(function, response="5", problem=ROW, full=1.0, **options):
    return FunctionVerifier(function, options, full).score([response], [problem])[0]


def test_arguments_are_given_by_their_names():
    seen = []

    def keeps(response, prompt, answer, problem, tolerance, missing=7, *, limit, **row):
        seen.append((response, prompt, answer, problem, tolerance, missing, limit, row))
        return True

    assert judged(keeps, limit=3) == Verdict("correct")
    assert seen == [("5", "2+4=", "6", ROW, 1, 7, 3, {"who": "a test"})]
    # A column never takes the place of what has the same name, and an option wins over a column.
    clashing = Problem("p", "a", {"response": "x", "responses": "y", "answer": "z", "limit": 9})

    def own_names(response, answer, limit):
        return (response, answer, limit) == ("r", "a", 3)

    own = FunctionVerifier(own_names, {"limit": 3}, None)
    assert own.score(["r"], [clashing]) == [Verdict("correct")]
    assert FunctionVerifier(lambda response, **row: row == {"limit": 9, "responses": "y"}, {}, None
                            ).score(["r"], [clashing]) == [Verdict("correct")]  # fmt: skip


@pytest.mark.parametrize(
    ("returned", "verdict"),
    [
        (True, Verdict("correct")),
        (np.bool_(False), Verdict("wrong")),
        (0.25, Verdict("wrong", 0.25)),
        (1, Verdict("correct", 1.0)),
        (np.float32(0.5), Verdict("wrong", 0.5)),
        (torch.tensor(1.0), Verdict("correct", 1.0)),
        (Verdict("unparsable", 0.1, "x"), Verdict("unparsable", 0.1, "x")),
    ],
)
def test_what_a_function_may_return(returned, verdict):
    assert judged(lambda response: returned) == verdict


@pytest.mark.parametrize("returned", [None, math.nan, math.inf, "1", [1.0], {"score": 1.0}])
def test_anything_else_is_no_verdict(returned):
    with pytest.raises(WrongReturn, match="returned .*, not True or False, a finite number, or a"):
        judged(lambda response: returned)


def test_a_number_needs_its_range():
    with pytest.raises(WrongReturn, match=r"returned the number 0.5.*from_score=\[|null; set it"):
        judged(lambda response: 0.5, full=None)
    assert judged(lambda response: True, full=None) == Verdict("correct")


def test_a_group_arrives_as_one_list():
    def longest(responses, answer):
        most = max(map(len, responses))
        return [len(text) == most for text in responses]

    own = FunctionVerifier(longest, {}, None)
    assert own.sees_group
    assert [v.status for v in own.score(["a", "abc"], [ROW] * 2)] == ["wrong", "correct"]
    with pytest.raises(WrongReturn, match="returned 1 results for 2 responses"):
        FunctionVerifier(lambda responses: [True], {}, None).score(["a", "b"], [ROW] * 2)
    with pytest.raises(WrongReturn, match="returned True, not a list"):
        FunctionVerifier(lambda responses: True, {}, None).score(["a", "b"], [ROW] * 2)


def test_the_signature_says_what_is_wrong_before_anything_is_judged():
    def of_elsewhere(data_source, solution_str, ground_truth, extra_info=None):
        return 1.0

    with pytest.raises(TypeError, match=r"of_elsewhere\(data_source.*parameter named response"):
        FunctionVerifier(of_elsewhere, {}, None)
    with pytest.raises(TypeError, match="which has no name"):
        FunctionVerifier(lambda response, /: True, {}, None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'limit'"):
        FunctionVerifier(lambda response: True, {"limit": 3}, None)
    own = FunctionVerifier(lambda response, tests: True, {}, None)
    assert own.check(ROW).startswith("has no column tests, which <lambda> has a parameter for")
    assert own.check(Problem("", "", {"tests": 1})) is None


def test_a_file_anywhere_is_loaded_by_its_path(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    (tmp_path / "beside.py").write_text("LIMIT = 3\n")
    (tmp_path / "own_rewards.py").write_text(
        "import dataclasses\nfrom beside import LIMIT\n\n"
        "@dataclasses.dataclass\nclass Kept:\n    limit: int = LIMIT\n\n"
        "def short(response):\n    return len(response) < Kept().limit\n"
    )
    short = load(f"{tmp_path}/own_rewards.py:short")
    assert isinstance(short, types.FunctionType) and judged(short, "ab") == Verdict("correct")
    with pytest.raises(FileNotFoundError, match="absent.py"):
        load(f"{tmp_path}/absent.py:short")


def test_the_full_score_is_where_the_reward_is_highest():
    def config(**fields):
        return RewardConfig(from_score=[-1.0, 2.0], **fields)

    assert full_score(RewardConfig(), "math") is None
    assert full_score(config(), "math") == 2.0
    scales = {"math": {"low": 0.0, "high": 10.0}, "code": {"mean": 0.5, "std": 0.25}}
    reward = config(scales=scales)
    assert (full_score(reward, "math"), full_score(reward, "code")) == (10.0, 1.0)
    # A threshold of the configuration wins.
    given = config(correct_from=0.5)
    assert scored_verdict(judged(lambda response: 0.75, full=2.0), given, "math").is_correct


def test_own_metrics_are_finite_numbers_with_names_that_metrics_may_have():
    assert verifier_module._NAME.pattern == LABEL
    assert Verdict("correct", metrics={"steps": 3, "is_short": True}).metrics["steps"] == 3
    computed = Verdict("wrong", np.float32(0.5), metrics={"n": np.int64(3), "is": np.bool_(True)})
    assert computed == Verdict("wrong", 0.5, metrics={"n": 3, "is": True})
    assert type(computed.score) is float and type(computed.metrics["n"]) is int
    for wrong in ({"a/b": 1.0}, {"a": math.nan}, {"a": "1"}, {3: 1.0}):
        with pytest.raises(ValueError, match="metrics"):
            Verdict("correct", metrics=wrong)


TRIED = """
from vapo_megatron.reward.verifier import Verdict

def good(response, answer, tolerance): return answer in response
def raises(response, answer): return int(response) == int(answer)
def lines(response): raise KeyError("one") if not response else ValueError("two\\n  lines:\\nhere")
def nan(response): return float("nan")
def number(response): return 0.5
def nothing(response): print(response)
def short(responses): return [True]
def group(responses): return Verdict("correct", metrics={"n": len(responses)}), False

class Floats:
    def score(self, responses, problems): return [0.5 for _ in responses]
class Two:
    def score(self, responses, problems): return [Verdict("correct")] * 2
class Slow:
    def score(self, responses, problems):
        import time; time.sleep(60)
"""


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("raises", {}, r"it raised ValueError: invalid literal .*tried.py\", line 5, in raises\)"),
        ("lines", {}, r"it raised ValueError: two lines: here \(.*tried.py\", line 6, in lines\)"),
        ("nan", {"from_score": [0, 1]}, "it returned nan, not True or False, a finite number, or"),
        ("number", {}, "it returned the number 0.5, a score, but reward.from_score=null; set it"),
        ("number", {"from_score": [1, 2]}, r"score 0.5 is outside reward.from_score=\[1, 2\]"),
        ("nothing", {}, "it returned None, not True or False"),
        ("short", {}, r"it returned 1 results for 2 responses: \[True\], not one for each"),
        ("Floats", {}, r"it returned \[0.5\] for 1 responses, not a Verdict for each"),
        ("Two", {}, "for 1 responses, not a Verdict for each"),
        ("Slow", {"timeout_seconds": 0.5}, "it gave no verdict: more than 0.5 seconds"),
    ],
)
def test_a_made_up_response_finds_a_verifier_that_judges_nothing(name, fields, message, tmp_path):
    (tmp_path / "tried.py").write_text(TRIED)
    reward = RewardConfig(
        verifier=f"{tmp_path}/tried.py:{name}", num_workers=1, **{"timeout_seconds": 60, **fields}
    )
    with Verifiers(reward) as verifiers, pytest.raises(ConfigError, match=message) as raised:
        verifiers.try_out([ROW])
    assert str(raised.value).startswith(f"reward.verifier={tmp_path}/tried.py:{name}: called once")
    assert "\n" not in str(raised.value)


def test_a_made_up_response_goes_to_each_verifier_with_a_row_that_it_judges(tmp_path, capfd):
    (tmp_path / "tried.py").write_text(TRIED)
    use = f"{tmp_path}/tried.py"
    reward = RewardConfig(
        num_workers=1, timeout_seconds=60, verifier="hybrid", hybrid=["near", "math"],
        verifiers={"near": {"use": f"{use}:good"}, "all": {"use": f"{use}:group"},
                   "never": {"use": f"{use}:raises"}},
    )  # fmt: skip
    rows = [Problem("p", "3"), ROW, Problem("p", "3", {"verifier": "all"})]
    with Verifiers(reward) as verifiers:
        # No row is judged by `never`, and the first that `near` accepts is the second.
        verifiers.try_out(rows)
        assert verifiers.sees_groups() and verifiers.sees_group(rows[2])
        assert not verifiers.sees_group(Problem("p", "3", {"verifier": "near"}))
        with pytest.raises(ConfigError, match="^reward.verifiers.never.use=.*:raises: called once"):
            verifiers.try_out([*rows, Problem("p", "3", {"verifier": "never"})])
        # The same object is a group; equal ones are not.
        one, other = (Problem("p", "3", {"verifier": "all"}) for _ in range(2))
        found = list(verifiers.score(["a", "b", "c", "d"], [one, other, one, other]))
    assert [v.status for v in found] == ["correct", "correct", "wrong", "wrong"]
    assert [dict(v.metrics) for v in found] == [{"n": 2}, {"n": 2}, {}, {}]
    assert capfd.readouterr().err == ""


def test_a_function_given_in_python_is_tried_out_too():
    reward = RewardConfig(num_workers=1, timeout_seconds=60)
    with Verifiers(reward, lambda response: None) as verifiers:
        with pytest.raises(ConfigError, match="^verifier=_lambda_: called once .* returned None"):
            verifiers.try_out([ROW])
    with Verifiers(reward, lambda response, answer: answer in response) as verifiers:
        verifiers.try_out([ROW])
        assert [v.status for v in verifiers.score(["6", "7"], [ROW] * 2)] == ["correct", "wrong"]


def test_the_label_of_a_path_has_no_slash():
    assert default_name(RewardConfig(verifier="rewards/own.py:near")) == "own.py:near"
    assert default_name(RewardConfig(), judged) == "judged"

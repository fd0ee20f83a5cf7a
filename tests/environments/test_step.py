"""What a step may be, rule by rule. Not exercised: how it travels (test_play.py)."""

import math

import numpy as np
import pytest

from tests.alone import loaded_by
from vapo_megatron.environments import Step
from vapo_megatron.environments.step import CUT, checked, text
from vapo_megatron.reward.functions import WrongReturn
from vapo_megatron.reward.verifier import Verdict

HELLO = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("step", "plain"),
    [
        (Step(), Step()),
        (Step("a", 1, True, True, "b"), Step("a", 1.0, True, Verdict("correct"), "b")),
        (Step(reward=True), Step(reward=1.0)),
        (Step(reward=np.float32(0.5), done=np.bool_(True)), Step(reward=0.5, done=True)),
        (Step(np.str_("a")), Step("a")),
        (Step(verdict=np.float64(0.25)), Step(verdict=Verdict("wrong", 0.25))),
        (Step([]), Step([])),
        (Step(failed_calls=np.int64(2)), Step(failed_calls=2)),
        (Step((HELLO,)), Step([HELLO])),
        (Step([{**HELLO, "name": "n"}]), Step([{**HELLO, "name": "n"}])),
        (Step("x" * 20), Step("x" * 20)),
        (Step("x" * 31), Step("x" * 14 + CUT)),
        (Step("a\ud800\udc00b", note="\udfff"), Step("a??b", note="?")),
        (
            Step(verdict=Verdict("wrong", answer="z" * 99, note="\ud800")),
            Step(verdict=Verdict("wrong", answer="z" * 14 + CUT, note="?")),
        ),
    ],
)
def test_what_is_kept_and_what_is_mended(step, plain):
    found = checked(step, 20, 0.5)
    assert found == plain
    assert [type(v) for v in vars(found).values()] == [type(v) for v in vars(plain).values()]
    assert checked(found, 20, 0.5) == found


def test_messages_share_the_limit():
    step = Step([{"role": "a", "content": "x" * 15}, {"role": "b", "content": "y" * 15}, HELLO])
    found = checked(step, 22, None).observation
    assert [m["content"] for m in found] == ["x" * 15, "y" + CUT, CUT]
    assert [m["role"] for m in found] == ["a", "b", "user"]
    assert checked(Step(found), 22, None).observation == found


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (None, "step returned None, not a Step"),
        (Step, "step returned <class '.*Step'>, not a Step"),
        ({"observation": ""}, "not a Step"),
        (Step(b"a"), "step's observation=b'a' must be text, or a list"),
        (Step(["a"]), "step's observation has 'a'; it must be text, or a list"),
        (Step({"role": "user", "content": ""}), "must be text, or a list of messages like"),
        (Step([{"role": "user"}]), "must be text, or a list"),
        (Step([{"role": "user", "content": [{"text": "a"}]}]), "must be text, or a list"),
        (Step([{**HELLO, 1: "a"}]), "must be text, or a list"),
        (Step([HELLO] * 101), "has 101 messages, more than 100"),
        (Step(reward=None), "step's reward=None must be a finite number"),
        (Step(reward=math.inf), "step's reward=inf must be"),
        (Step(reward=1j), "step's reward=1j must be"),
        (Step(reward=np.zeros(2)), "step's reward=array"),
        (Step(done=None), "step's done=None must be True or False"),
        (Step(done="yes"), "step's done='yes' must be"),
        (Step(note=None), "step's note=None must be text"),
        (Step(failed_calls=-1), "step's failed_calls=-1 must be a whole number from 0 to"),
        (Step(failed_calls=1.0), "step's failed_calls=1.0 must be a whole number"),
        (Step(failed_calls=True), "step's failed_calls=True must be a whole number"),
        (Step(failed_calls=10**400), "must be a whole number from 0 to 1048576"),
        (Step(verdict="correct"), "step's verdict: returned 'correct', not True or False"),
        (Step(verdict=math.nan), "step's verdict: returned nan, not True or False"),
        (Step(verdict=0.5), "step's verdict: returned the number 0.5, a score"),
    ],
)
def test_what_is_refused(step, message):
    with pytest.raises(WrongReturn, match=message):
        checked(step, 20, None)


def test_a_text_as_long_as_allowed_is_whole():
    assert [text("abcdefgh", n) for n in (9, 8, 7)] == ["abcdefgh", "abcdefgh", "a" + CUT]


def test_an_environments_process_loads_no_torch():
    assert loaded_by("from vapo_megatron.environments import Step", ("torch",)) == []

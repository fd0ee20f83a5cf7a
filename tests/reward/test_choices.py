"""Which choice an answer names: whole words, several, negations, thoughts. No server."""

import time

import pytest

from vapo_megatron.reward.choices import named_choice

YES_NO, CORRECT, GRADES = ("YES", "NO"), ("CORRECT", "INCORRECT"), ("0", "5", "7", "10")


@pytest.mark.parametrize(
    ("text", "choices", "named"),
    [
        ("YES", YES_NO, "YES"), (" NO\n", YES_NO, "NO"), ("**YES**", YES_NO, "YES"),
        ("NO.", YES_NO, "NO"), ('"YES"', YES_NO, "YES"), ("<answer>NO</answer>", YES_NO, "NO"),
        (r"\boxed{YES}", YES_NO, "YES"), ("YES, it is. YES!", YES_NO, "YES"),
        ("NO - it differs", YES_NO, "NO"), ("- YES", YES_NO, "YES"),
        ("INCORRECT", CORRECT, "INCORRECT"), ("It is INCORRECT.", CORRECT, "INCORRECT"),
        ("NOT CORRECT", ("CORRECT", "NOT CORRECT"), "NOT CORRECT"),
        ("So: NOT CORRECT.", ("CORRECT", "NOT CORRECT"), "NOT CORRECT"),
        ("A+", ("A", "A+"), "A+"), ("10", GRADES, "10"), ("7 out of 10", GRADES, "7"),
        ("grade: 5.", GRADES, "5"), ("-5", ("5", "-5"), "-5"),
        ("\u6b63\u786e", ("\u6b63\u786e", "\u4e0d\u6b63\u786e"), "\u6b63\u786e"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("may_think", [False, True])
def test_an_answer_names_a_choice(text, choices, named, may_think):
    assert named_choice(text, choices, may_think=may_think) == named


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("", YES_NO), ("yes", YES_NO), ("YESTERDAY", YES_NO), ("NOT", YES_NO), ("YES/NO", YES_NO),
        ("YES / NO", YES_NO), ("NO's", YES_NO), ("YES-like", YES_NO), ("non-YES", YES_NO),
        ("_YES_NO", YES_NO), ("not YES", YES_NO), ("Not a YES", YES_NO), ("**not** YES", YES_NO),
        ("It isn't YES.", YES_NO), ("never really YES", YES_NO), ("YES? ", YES_NO),
        ("YES is not the answer", YES_NO), ("YES isn\u2019t right", YES_NO),
        ("not CORRECT", CORRECT), ("NOT CORRECT", CORRECT), ("UNCORRECT", CORRECT),
        ("cannot be CORRECT", CORRECT), ("neither CORRECT nor INCORRECT", CORRECT),
        ("INCORRECT, not CORRECT", CORRECT), ("PARTLY-CORRECT", CORRECT),
        ("100", GRADES), ("0.5", GRADES), ("7/10", GRADES), ("5%", GRADES), ("-5", GRADES),
        ("1,000", GRADES), ("\u4e0d\u6b63\u786e", ("\u6b63\u786e",)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("may_think", [False, True])
def test_an_answer_names_none(text, choices, may_think):
    with pytest.raises(ValueError, match="it answered "):
        named_choice(text, choices, may_think=may_think)


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("YES or NO? It agrees, so YES", "YES"),
        ("YES at first. Then NO", "NO"),
        ("It is not YES. So NO", "NO"),
        ("<think>YES NO YES</think>NO", "NO"),
        ("YES</think>\n\nThe answer: NO.", "NO"),
        ("<think>a</think>YES<think>b</think> NO", "NO"),
    ],
)
def test_of_several_the_last_counts_only_where_the_model_may_think(text, last):
    assert named_choice(text, YES_NO, may_think=True) == last
    with pytest.raises(ValueError, match="it answered (2 of the choices|a negated choice)"):
        named_choice(text, YES_NO, may_think=False)


@pytest.mark.parametrize(
    "text", ["<think>so YES", "<think>YES</think>", "YES</think> I cannot say"]
)
def test_what_is_thought_is_no_answer(text):
    with pytest.raises(ValueError, match="it answered"):
        named_choice(text, YES_NO, may_think=True)


def test_a_long_answer_takes_no_time():
    text = ("not " * 300_000 + "YES ") * 2 + "YES/" * 300_000 + "n't " * 300_000
    began = time.process_time()
    for may_think in (True, False):
        with pytest.raises(ValueError):
            named_choice(text, YES_NO, may_think=may_think)
    assert time.process_time() - began < 20

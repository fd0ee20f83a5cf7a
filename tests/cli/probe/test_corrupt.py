"""A wrong number in a chain of thought and what follows from it, by hand."""

import random
from fractions import Fraction

import pytest

from vapo_megatron.cli.probe.corrupt import corruptions, last_value


def found(chain, prompt="", seed=0):
    """Every corrupted chain by its text, with the value of its last step."""
    return {c.chain: c.answer for c in corruptions(chain, prompt, random.Random(seed))}


def test_an_error_is_carried_to_all_that_uses_it():
    chain = "She sold 48/2 = 24 clips in May, 24 of them red. Together 48+24 = 72 clips."
    of_first = {
        f"She sold 48/2 = {n} clips in May, {n} of them red. Together 48+{n} = {48 + n} clips.":
        str(48 + n) for n in (22, 23, 25, 26)
    }  # fmt: skip
    of_last = {
        f"She sold 48/2 = 24 clips in May, 24 of them red. Together 48+24 = {n} clips.": str(n)
        for n in (70, 71, 73, 74)
    }
    assert found(chain) == of_first | of_last


def test_annotations_of_gsm8k():
    chain = "In May 48/2 = <<48/2=24>>24.\nIn all 48+24 = <<48+24=72>>72."
    assert found(chain)["In May 48/2 = <<48/2=25>>25.\nIn all 48+25 = <<48+25=73>>73."] == "73"


def test_a_number_that_was_there_before_is_not_made_wrong():
    # 24 of the prompt could be meant later.
    assert set(found("48/2 = 24. 24*3 = 72", "Of 24 hours").values()) == {"70", "71", "73", "74"}
    assert found("12*2 = 24. 48/2 = 24", "") and not found("48/2 = 24", "24 clips")
    # Nor is a number chosen as wrong that another one is already: 4 - 1 is 3, which is in it.
    assert set(found("3+1 = 4").values()) == {"2", "5", "6"}


def test_a_later_step_of_the_same_value_is_its_own():
    chain = "2*4 = 8, 5+3 = 8, 8+1 = 9"
    # The last 8 is the second step's, so the first step's error ends there.
    assert found(chain)["2*4 = 7, 5+3 = 8, 8+1 = 9"] == "9"
    # The second 8 is no new number.
    assert not any("5+3 = 9" in text for text in found(chain))


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ("2 * 3 = 6 + 1 = 7", "2 * 3 = 5 + 1 = 6"),
        ("(2+3)*4 = 20; 20/8=2.5", "(2+3)*4 = 19; 19/8=2.4"),
        ("$1,200*2 = $2,400 and 2,400+1 = 2,401", "$1,200*2 = $2,399 and 2,399+1 = 2,400"),
        ("0.5*3 = 1.5. 1.5×4 = 6", "0.5*3 = 1.4. 1.4×4 = 5.6"),
        ("7-2 = 5; 5*2-9 = 1", "7-2 = 4; 4*2-9 = -1"),
        ("2+3 = 5, 12/5 = 2.4, 1+2.4 = 3.4", "2+3 = 4, 12/4 = 3.0, 1+3.0 = 4.0"),
        ("1+2 = 3; 9/3 = 3; 3÷3 = 1", "1+2 = 4; 9/4 = 2.25; 2.25÷2.25 = 1"),
        ("9 − 4 = 5", "9 − 4 = 6"),
    ],
)
def test_forms(chain, expected):
    assert expected in found(chain)


def test_what_is_no_step_is_left_alone():
    for chain in (
        "2+2 = 5", "2x + 3 = 11", "b*2=8nopq,", "10% * 50 = 5", "3 = 3", "2+2", "1/0 = 5",
        "007+1 = 8", "7-9 = -2", "(1+2 = 3", "",
    ):  # fmt: skip
        assert not found(chain) and last_value(chain) is None, chain
    # The 4 of a sum of three terms is not 3 + 1 alone.
    assert set(found("2+3+1 = 6").values()) == {"4", "5", "7", "8"}
    # A value may be rounded to its own decimals.
    assert last_value("10/3 = 3.33") == Fraction(333, 100) and last_value("10/3 = 3.3333") > 3
    assert last_value("10/3 = 3") is last_value("10/3 = 3.34") is None


def test_the_seed_decides_the_order():
    chain = "1+1 = 2, 2+5 = 7, 7*7 = 49, 49-9 = 40"

    def first(seed):
        return next(corruptions(chain, "", random.Random(seed))).chain

    assert first(1) == first(1) and len({first(seed) for seed in range(20)}) > 5

"""What counts as the final answer of a response.

Not exercised: whether the answer is right (test_math_verifier.py).
"""

import time

import pytest

from vapo_megatron.reward.extraction import (
    MAX_ANSWER_CHARACTERS,
    MAX_EMPTY_MARKERS,
    answer_begins,
    clean,
    final_answer,
    ground_truth,
    plain_integer,
    with_unit,
)


def test_every_format_is_read():
    for response, answer in [
        (r"so \boxed{5}", "5"),
        (r"\boxed{\frac{\sqrt{2}}{3}} as shown.", r"\frac{\sqrt{2}}{3}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {7}", "7"),
        (r"$$\fbox{7}$$", "7"),
        ("Answer: 12", "12"),
        ("answer:12", "12"),
        ("**Answer:** 12.", "12"),
        ("**Final Answer**: 12", "12"),
        ("Answer:\n\n12\n\nThat is it.", "12"),
        ("Answer: 12. This follows from above.", "12"),
        ("Answer: the final answer is 12", "12"),
        ("Answer: 12 apples", "12"),
        ("Answer: $12$ apples", "12"),
        (r"Answer: \(x = 12\)", "x = 12"),
        ("Answer: $$\n\\frac{1}{2}\n$$", r"\frac{1}{2}"),
        ("Answer\uff1a 12", "12"),
        ("Answer: \u221212", "-12"),
        ("Answer: 1.5e-3", r"1.5 \times 10^{-3}"),
        ("Natalia sold 24.\n#### 72", "72"),
        ("####1,234", "1,234"),
        ("b*2=8nopqrstuvwx,Answer:8", "8"),
        ("Answer:8", "8"),
        ("\u7b54\u6848\uff1a12", "12"),
        ("\u6240\u4ee5\u7b54\u6848\u662f $12$\u3002", "12\u3002"),
        (r"Answer: $12\,$", "12"),
        (r"\boxed{12\quad}", "12"),
    ]:
        assert final_answer(response) == answer, (response, answer)


def test_where_the_final_answer_begins():
    for before, answer in [
        ("Natalia sold 24.\n", "#### 72"),
        ("b*2=8nopqrstuvwx,", "Answer:8"),
        ("Answer: 1. But $", r"\boxed{2}$"),
        (r"\boxed{1} and ", r"\boxed{2}."),
        ("So the f", "inal answer is 5."),
        ("", "Answer: 5\nAnswer:"),
    ]:
        assert answer_begins(before + answer) == len(before), (before, answer)
    assert answer_begins("5") is None and answer_begins("Answer:") is None


def test_only_the_last_counts():
    for response, answer in [
        (r"\boxed{1} no, \boxed{2}", "2"),
        ("Answer: 1\nAnswer: 2", "2"),
        (r"Answer: 1. But \boxed{2}", "2"),
        (r"\boxed{1} Answer: 2", "2"),
        ("#### 1\nAnswer: 2", "2"),
        ("Answer: 1\n#### 2", "2"),
        (r"Answer: \boxed{2}", "2"),
        (r"\boxed{Answer: 2}", "2"),
        (r"\boxed{\boxed{2}}", "2"),
    ]:
        assert final_answer(response) == answer, (response, answer)


def test_a_marker_without_an_answer_is_none():
    for response, answer in [
        ("", None),
        ("the result is 5", None),
        (r"\boxed{", None),
        (r"\boxed{5", None),
        (r"\boxed{}", None),
        ("Answer:", None),
        ("Answer: ** .", None),
        ("##### 5", None),
        ("answers 5", None),
        (r"\boxed{3} and then \boxed{\frac{1}{2", "3"),
        ("Answer: 3\nAnswer:", "3"),
        ("Answer: 3\nAnswer:\n\nAnswer: **\n####\n", "3"),
        (r"Answer: 3 \boxed{} and \boxed{4", "3"),
        (r"Answer: \boxed{}", None),
    ]:
        assert final_answer(response) == answer, (response, answer)


def test_words_that_change_the_value_stay():
    for text, cleaned in [
        ("$5$ and $6$", "5 and 6"),
        ("$5$ or so", "5 or so"),
        ("not $5$", "not 5"),
        ("5 or more", "5 or more"),
        ("5 thousand", "5 thousand"),
        ("5 percent", "5 percent"),
        ("$5$ percent", "5 percent"),
        ("5 minus 2", "5 minus 2"),
        ("5, 6 apples", "5, 6 apples"),
        ("2 thirds", "2 thirds"),
        ("7 tenths of it", "7 tenths of it"),
        ("5 months", "5"),
        ("5 x", "5 x"),
        (r"\$5", r"\$5"),
        ("5!", "5!"),
    ]:
        assert clean(text) == cleaned, (text, cleaned)


def test_a_ground_truth_may_be_a_worked_solution_or_the_bare_answer():
    assert ground_truth("She has 3 * 4 = 12.\n#### 12") == "12"
    assert ground_truth(r"$\frac{1}{2}$") == r"\frac{1}{2}"
    assert ground_truth(" 42 ") == "42"


def test_plain_integers():
    texts = ["5", "-5", "+5", "007", "1,234", "12,345,678", "1,23", "5.0", "1/2", "x", "", "5 6"]
    expected = [5, -5, 5, 7, 1234, 12345678, None, None, None, None, None, None]
    assert [plain_integer(text) for text in texts] == expected


def test_too_long_an_answer_stays_too_long():
    for response in ("Answer: " + "1+" * 5000 + "1", r"\boxed{" + "1+" * 5000 + "1}"):
        answer = final_answer(response)
        assert answer is not None and len(answer) > MAX_ANSWER_CHARACTERS


def test_babble_behind_the_answer_is_searched_only_so_far():
    for marker in (r"\boxed{", "Answer: **", "#### "):
        assert final_answer("Answer: 5\n" + (marker + "\n") * (MAX_EMPTY_MARKERS - 1)) == "5"
        assert final_answer("Answer: 5\n" + (marker + "\n") * MAX_EMPTY_MARKERS) is None


@pytest.mark.parametrize(
    "unit",
    [
        "\\boxed{",
        "\\boxed{}",
        "Answer:",
        "answer" + " " * 50,
        "{",
        "}",
        "#### ",
        "Answer: }",
        "#",
        "$",
    ]
    + ["nswer", "Answer: \\(", "answer*", "\\\\boxed"],
)
def test_time_is_linear_in_the_length(unit):
    def seconds(size):
        text = unit * (size // len(unit))
        return min(_timed(text) for _ in range(3))

    # Linear work grows 8 times, quadratic work 64 times; 2 ms cover what does not grow.
    assert seconds(160_000) < 24 * seconds(20_000) + 2e-3


def _timed(text):
    start = time.process_time()
    final_answer(text)
    return time.process_time() - start


def test_boxes_that_only_a_comma_or_a_word_separates_are_one_list():
    for response, answer in [
        (r"The roots are $\boxed{-2}$ and $\boxed{1}$.", "-2, 1"),
        (r"$\boxed{1}$, $\boxed{2}$, and $\boxed{3}$", "1, 2, 3"),
        (r"either \boxed{1} or \boxed{2}", "1, 2"),
        (r"$x=\boxed{1}$ and $y=\boxed{2}$", "x=1, y=2"),
        (r"$x=\boxed{1}$ or $x=\boxed{2}$", "1, 2"),
        (r"\boxed{3}, \boxed{3}", "3"),
        (r"\boxed{1}, \boxed{} and \boxed{2}", "2"),
        (r"First \boxed{5}, no: \boxed{7}", "7"),
        (r"\boxed{5}. And \boxed{7}", "7"),
        (r"\boxed{5} Answer: 7", "7"),
    ]:
        assert final_answer(response) == answer, response


def test_a_sentence_says_its_last_value():
    for response, answer in [
        ("Answer: The volume of $ABCDEFGH$ is 120. I hope it is correct.", "120"),
        (r"Answer: The probability is $\frac14$.", r"\frac14"),
        ("Answer: so x equals 8", "8"),
        ("Answer: It is not 15.", "not 15"),
        ("Answer: It is 15 or 16.", "15 or 16"),
        ("Answer: 8, because 3 + 5 = 8", "8"),
        ("Answer: The first is 14 and the last is 15.", "The first is 14 and the last is 15"),
    ]:
        assert final_answer(response) == answer, response


def test_the_words_behind_a_number_may_be_its_unit():
    texts = ["5 cm", "$5$ feet", "$5$ and $6$", "5 months", "**5** ways", "x = 5"]
    assert [with_unit(t) for t in texts] == [
        "5 cm",
        "5 feet",
        "5 and 6",
        "5 months",
        "5 ways",
        "x = 5",
    ]
    assert [clean(t) for t in texts] == ["5 cm", "5", "5 and 6", "5", "5", "x = 5"]


def test_without_a_marker_a_sentence_says_what_the_final_answer_is():
    for response, answer in [
        ("The final answer is 5.", "5"),
        (
            "The final answer is 4.\nNo, the final answer is $\\frac12$. I hope it is correct.",
            "\\frac12",
        ),
        ("My final answer is: **7**", "7"),
        ("The final answer is \\boxed{5}", "5"),
        # A marker stands above it, before or behind.
        ("\\boxed{5} The final answer is right.", "5"),
        ("Answer: 5\nThe final answer is 6", "5"),
        ("The final answer is", None),
        ("The answer is 5", None),
    ]:
        assert final_answer(response) == answer, response


def test_a_box_may_have_a_number_without_braces():
    for response, answer in [
        ("So $\\boxed 5$.", "5"),
        ("$\\boxed -12,345.5$", "-12,345.5"),
        ("\\boxed{4} and \\boxed 5", "4"),
        ("$\\boxed{4}$ and $\\boxed 5$", "5"),
        ("We use \\boxed as a marker.", None),
        ("\\boxed x", None),
    ]:
        assert final_answer(response) == answer, response

"""What of a response is its chain of thought, and the beginning of one."""

import pytest

from vapo_megatron.cli.probe.chain import cut, without_answer


@pytest.mark.parametrize(
    ("response", "chain"),
    [
        ("She sold 24.\nTogether 72.\n#### 72", "She sold 24.\nTogether 72."),
        ("b*2=8nopq,c-3=5nopq,Answer:5", "b*2=8nopq,c-3=5nopq,"),
        ("So x is 5. The final answer is $\\boxed{5}$.", "So x is 5."),
        ("So x is 5.\n\n**Answer:** 5\n", "So x is 5."),
        ("x = 2.5 here. Then the final answer is 2.5", "x = 2.5 here."),
        # The last one alone is the answer.
        ("Answer: 4\nNo, it is 5.\nAnswer: 5", "Answer: 4\nNo, it is 5."),
        ("Answer: 5", ""),
        ("No answer here.\n", "No answer here."),
    ],
)
def test_a_chain_ends_before_its_answer(response, chain):
    assert without_answer(response) == chain


def test_a_share_of_the_steps():
    chain = "a\nb\n\nc\nd\ne"
    # Six lines, one of them empty.
    found = {share: cut(chain, share, "\n") for share in (0.01, 0.34, 0.5, 0.99, 1.0)}
    assert found == {0.01: "a", 0.34: "a\nb", 0.5: "a\nb", 0.99: "a\nb\n\nc\nd", 1.0: chain}
    assert cut(chain, 0.5, "\n\n") == "a\nb"
    assert cut("a=1,b=2,c=3,d=4,e=5,", 0.6, ",") == "a=1,b=2,c=3,"
    assert cut("one", 0.5, "\n") == "one" and cut("", 0.5, "\n") == ""

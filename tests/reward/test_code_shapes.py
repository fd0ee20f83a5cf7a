"""Right and wrong programs against rows as published data sets have them.

Not exercised: the data sets themselves.
"""

import pytest

from tests.reward.code_shapes import RIGHT, ROWS, WRONG
from tests.reward.test_code_verifier import verifier
from vapo_megatron.reward.verifier import Problem

__all__ = ["verifier"]


@pytest.mark.parametrize("name", ROWS)
def test_right_and_wrong_programs(verifier, name):
    columns = dict(ROWS[name])
    problem = Problem(columns.get("prompt", ""), columns.pop("answer", ""), columns)
    assert verifier.check(problem) is None
    for programs, status in ((RIGHT[name], "correct"), (WRONG[name], "wrong")):
        for program in programs:
            (verdict,) = verifier.score([f"```python\n{program}\n```"], [problem])
            assert verdict.status == status, (program, verdict)


def test_the_programs_are_many():
    assert RIGHT.keys() == WRONG.keys() == ROWS.keys()
    assert sum(map(len, RIGHT.values())) > 50 and sum(map(len, WRONG.values())) > 40

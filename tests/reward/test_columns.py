"""Which columns count for a verdict: those that its verifier reads, and no others.

Not exercised: what the samples' header makes of it (tests/rollout/evaluation/test_samples_file.py).
"""

import pytest

from vapo_megatron.config import VapoConfig
from vapo_megatron.data.problems import Problem
from vapo_megatron.reward.code_tests import read_tests
from vapo_megatron.reward.columns import columns_read
from vapo_megatron.reward.exact_verifier import KINDS, ExactVerifier


class Recorded(dict):
    """A row's columns, which remember what is read."""

    def __init__(self, columns):
        super().__init__(columns)
        self.read = set()

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)


def reward(**fields):
    return VapoConfig(reward=fields).reward


EVERYTHING = {
    "kind": "text", "schema": "{}", "level": 1, "test_list": ["assert f(1) == 2"],
    "tests": [{"input": [1], "output": 2}], "fn_name": "f", "test_imports": "import math",
    "metadata": "{}", "hint": "h", "verifier": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_exact_reads_counts(kind):
    columns = Recorded({"kind": kind, "schema": '{"type": "integer"}', "level": 1})
    problem = Problem("p", {"choice": "A"}.get(kind, "1"), columns)
    ExactVerifier().score(["The answer is 1"], [problem])
    assert {"kind"} <= columns.read
    assert columns.read & columns.keys() <= columns_read(problem, reward(verifier="exact"))


def test_what_code_reads_counts():
    columns = Recorded({"test_list": ["assert f(1) == 2"], "metadata": "{}", "level": 1})
    problem = Problem("p", "", columns)
    read_tests(problem)
    of_code = columns_read(problem, reward(verifier="code"))
    assert columns.read & columns.keys() <= of_code == {"test_list", "metadata"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"verifier"}),
        ({"verifier": "reward_model"}, {"verifier"}),
        ({"verifier": "exact"}, {"verifier", "kind", "schema"}),
        ({"verifier": "hybrid", "hybrid": ["math", "exact"]}, {"verifier", "kind", "schema"}),
        # One's own may read anything, also among those that hybrid tries.
        ({"verifier": "a.b:C"}, set(EVERYTHING)),
        (
            {"verifier": "hybrid", "hybrid": ["math", "own"], "verifiers": {"own": {"use": "a:C"}}},
            set(EVERYTHING),
        ),
        (
            {"verifier": "judge", "verifiers": {"judge": {"template": "{response} {hint}"}}},
            {"verifier", "hint"},
        ),
        ({"verifier": "judge", "verifiers": {"judge": {"template": "a_file"}}}, set(EVERYTHING)),
        ({"verifier": "judge"}, {"verifier"}),
        (
            {"verifier": "pairwise", "verifiers": {"pairwise": {"reference_column": "hint"}}},
            {"verifier", "hint"},
        ),
    ],
)
def test_columns_by_verifier(fields, expected):
    assert columns_read(Problem("p", "1", EVERYTHING), reward(**fields)) == expected


def test_the_verifier_that_a_row_names_decides():
    problem = Problem("p", "1", {**EVERYTHING, "verifier": "exact"})
    assert columns_read(problem, reward()) == {"verifier", "kind", "schema"}

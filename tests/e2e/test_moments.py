"""The functions at which test_kill_matrix.py (-m slow) kills a run are still there."""

from tests.e2e.moments import KINDS, find, halves


def missing():
    found = {kind.target: find(kind.target) for kind in KINDS.values()}
    return [target for target, (owner, name) in found.items() if not hasattr(owner, name)]


def test_each_moment_is_of_a_function_that_there_is(vllm_workers):
    assert vllm_workers.run(1, missing) == [[]]


def test_each_half_is_of_a_moment():
    assert set(halves()) == {kind.target for kind in KINDS.values() if kind.when == "half"}

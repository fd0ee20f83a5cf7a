"""A user's verifier in processes of its own: whatever it does costs one verdict.

Not exercised: limits of a machine that has less memory than reward.memory_gb.
"""

import contextlib

import pytest

from tests.reward import limits, own_verifiers
from tests.sandbox.marked import gone, marked
from vapo_megatron.errors import ConfigError
from vapo_megatron.reward.isolated import IsolatedVerifier
from vapo_megatron.reward.verifier import Problem, Verdict

MODULE = "tests.reward.own_verifiers"
PROBLEM = Problem("Who?", "Ada", {"who": "a test"})


def isolated(verifier, options=(), *, num_workers=2, timeout_seconds=60.0, memory_bytes=10**9):
    return IsolatedVerifier(
        "own", verifier, dict(options), num_workers=num_workers,
        timeout_seconds=timeout_seconds, memory_bytes=memory_bytes,
    )  # fmt: skip


MARK = "VAPO_TESTS_MISBEHAVES"
"""In the environment of the verifier's processes, which those that they start inherit."""


@pytest.fixture(scope="module")
def started():
    verifier = isolated(f"{MODULE}:Misbehaves", memory_bytes=2 * 10**8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, "1")
        yield verifier
    verifier.close()


@pytest.fixture
def misbehaves(started, monkeypatch):
    """A verifier whose limit holds for what never ends."""
    limits.limit(monkeypatch, 1.0, "loop", "sleep", "child")
    return started


def test_verdicts_arrive_whole_and_in_order():
    with contextlib.closing(isolated(f"{MODULE}:Contains", {"ignore_case": True})) as verifier:
        responses = ["ada", "Bob", "it is ADA!"] * 20
        verdicts = verifier.score(responses, [PROBLEM] * 60)
    note = "for a test by Who?"
    assert verdicts == 20 * [
        Verdict("correct", 1.0, "ada", note),
        Verdict("wrong", 1.0, "bob", note),
        Verdict("correct", 0.3, "it is ad", note),
    ]


@pytest.mark.parametrize("kind", ["class", "instance", "of no module"])
def test_a_verifier_given_in_python_judges_alike(kind):
    class Own(own_verifiers.Contains):
        pass

    given = {
        "class": own_verifiers.Contains,
        "instance": own_verifiers.Contains(ignore_case=True),
        "of no module": Own(ignore_case=True),
    }[kind]
    with contextlib.closing(isolated(given, num_workers=1)) as verifier:
        found = [v.status for v in verifier.score(["ada", "Ada"], [PROBLEM] * 2)]
    assert found == ["wrong" if kind == "class" else "correct", "correct"]


def test_one_verdict_is_lost_for_each_fault(misbehaves, capfd):
    faults = {
        "raise_it": "RuntimeError: no such test",
        "leave": "SystemExit: good bye",
        "crash": "its process died",
        "vanish": "its process died",
        "memory": "more than 0.2 GB of memory",
        "no_verdict": "returned [True] for 1 responses, not a Verdict for each",
        "bad_status": "ValueError: status='good' must be one of correct, wrong, unparsable, "
        "timed_out, failed",
        "not_finite": "ValueError: score=nan must be a finite number or None",
        "no_such_method": "AttributeError: 'Misbehaves' object has no attribute 'no_such_method'",
    }
    asked = [name for fault in faults for name in ("well", fault, "well")]
    verdicts = misbehaves.score(asked, [PROBLEM] * len(asked))
    assert [v.status for v in verdicts] == ["correct", "failed", "correct"] * len(faults)
    assert [v.note for v in verdicts[1::3]] == list(faults.values())
    warnings = capfd.readouterr().err
    assert warnings.count("warning: the verifier own failed: RuntimeError: no such test") == 1
    assert warnings.count("warning: ") == 1 and 'raise RuntimeError("no such test")' in warnings


def test_what_hangs_is_killed_with_its_children(misbehaves):
    asked = ["loop", "well", "sleep", "child", "well"]
    verdicts = misbehaves.score(asked, [PROBLEM] * len(asked))
    expected = ["timed_out", "correct", "timed_out", "timed_out", "correct"]
    assert [v.status for v in verdicts] == expected and verdicts[0].note == "more than 60 seconds"
    assert marked(MARK)
    misbehaves.close()
    assert gone(MARK), "a child lives on"


def test_large_messages_pass_both_ways_and_prints_do_not_mix_with_them(misbehaves):
    large = Problem("p" * 2_000_000, "a", {"tests": ["t" * 1000] * 5000})
    found = misbehaves.score(["long", "prints", "well"], [large] * 3)
    assert [v.status for v in found] == ["correct"] * 3 and len(found[0].answer) == 3_000_000


def test_the_number_of_verdicts_must_be_right():
    with contextlib.closing(isolated(f"{MODULE}:CountsWrong", num_workers=1)) as verifier:
        assert [v.status for v in verifier.score(["a"], [PROBLEM])] == ["failed"]


def test_optional_methods_check_problems_and_compare_answers():
    problems = [PROBLEM, Problem("Who?", ""), Problem("Who?", "breaks")]
    pairs = [(PROBLEM, "Ada", "A."), (PROBLEM, "Ada", "Bob"), (PROBLEM, "", "Bob")]
    strict, plain = isolated(f"{MODULE}:Strict"), isolated(f"{MODULE}:Contains")
    try:
        assert strict.unusable(problems) == {
            1: "is refused by the verifier own: has no ground truth",
            2: "is refused by the verifier own: KeyError: 'tests'",
        }
        assert strict.same_answers(pairs) == [True, False, False]
        assert plain.unusable(problems) == {} and plain.same_answers(pairs) == [False] * 3
    finally:
        strict.close()
        plain.close()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such_module:A", {}, "ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{MODULE}:Absent", {}, "has no attribute 'Absent'"),
        (f"{MODULE}:NeedsOption", {}, "missing 1 required positional argument: 'limit'"),
        (f"{MODULE}:Contains", {"limit": 3}, "unexpected keyword argument 'limit'"),
        (f"{MODULE}:NoVerifier", {}, r"NoVerifier has no method score\(responses, problems\), and"),
    ],
)
def test_what_does_not_load_is_the_users_mistake(name, options, message):
    verifier = isolated(name, options, num_workers=1)
    with pytest.raises(ConfigError, match=message):
        verifier.unusable([PROBLEM])


def test_what_cannot_be_pickled_is_the_users_mistake():
    holds_a_lock = own_verifiers.Contains()
    holds_a_lock.lock = __import__("threading").Lock()
    with pytest.raises(ConfigError, match="cannot be sent to the processes that judge"):
        isolated(holds_a_lock)

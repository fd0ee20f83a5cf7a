"""Hostile environments: each costs its own episode, others go on, and nothing is left of it.

Not exercised: what ends its parent, or all processes of its user, which nothing here prevents.
"""

import gc
import os
import resource

import pytest

from tests.environments import own_environments
from tests.environments.playing import answers, closed, play, started
from tests.sandbox import limits
from tests.sandbox.marked import gone, marked
from vapo_megatron.environments.step import CUT
from vapo_megatron.reward.verifier import Problem

MODULE = "tests.environments.own_environments"
MARK = f"VAPO_TESTS_HOSTILE_{os.getpid()}"
OVER_TIME = "more than 60 seconds"
DIED = "its process died"
ODD = "its process sent something else than a step"
MEMORY = "more than 0.4 GB of memory"
MESSAGES = "must be text, or a list of messages like {'role': 'user', 'content': text}"

FAILURES = {
    "sleep": OVER_TIME,
    "loop": OVER_TIME,
    "stop": OVER_TIME,
    "catches_all": OVER_TIME,
    "own_signals": OVER_TIME,
    "bomb": OVER_TIME,
    "raises": "RuntimeError: no such move",
    "raises_much": "RuntimeError: ? z? z? z? z",
    "leaves": "SystemExit: good bye",
    "interrupts": "KeyboardInterrupt",
    "no_such_move": "AttributeError: 'Hostile' object has no attribute 'no_such_move'",
    "vanishes": DIED,
    "kills_itself": DIED,
    "kills_its_group": DIED,
    "crashes": DIED,
    "fills": MEMORY,
    "recurses": "RecursionError: maximum recursion depth exceeded",
    "closes_files": DIED,
    "opens_files": "OSError: [Errno 24] Too many open files: '/dev/null'",
    "reads": "EOFError: EOF when reading a line",
    "replies_junk": DIED,
    "replies_endlessly": DIED,
    "forges": ODD,
    "forges_an_error": ODD,
    "replaces_json": DIED,
    "replaces_the_check": ODD,
    "returns_none": "step returned None, not a Step",
    "returns_bytes": "step returned ",
    "returns_text": "step returned 'well', not a Step",
    "returns_five": "step returned ('', 0.0, True, False, {}), not a Step",
    "returns_bad_repr": "step returned <BadRepr instance at ",
    "returns_a_bomb": f"step returned <{MODULE}.Explodes object at ",
    "observes_a_number": f"step's observation=5 {MESSAGES}",
    "observes_none": f"step's observation=None {MESSAGES}",
    "observes_itself": "step's observation has {'content': {'content': ",
    "observes_too_many": "step's observation has 1000000 messages, more than 100",
    "observes_other_keys": "step's observation has {'content': '', 'role': 'user', 'tool_calls': ",
    "rewards_text": "step's reward='1' must be a finite number",
    "rewards_nan": "step's reward=nan must be a finite number",
    "rewards_much": "step's reward=100000000000000000...0000000000000000000 must be a finite",
    "is_done_once": "step's done=1 must be True or False",
    "notes_bytes": "step's note=b'' must be text",
    "judges_in_words": "step's verdict: returned 'good', not True or False, a finite number, or a",
    "judges_by_score": "step's verdict: returned the number 0.5, a score, but reward.from_score=",
    "judges_falsely": "step's verdict: status='best' must be one of correct, wrong, unparsable, ",
    "reset_sleep": OVER_TIME,
    "reset_raises": "RuntimeError: no such move",
    "reset_vanishes": DIED,
    "reset_returns_five": "reset's observation has ''; it must be text, or a list of messages",
}
"""What is done -> how the note begins; a reset's is in the problem, all others are actions."""

OBSERVATIONS = {
    "prints": "well",
    "prints_a_header": "well",
    "has_threads": "well",
    "has_children": "well",
    "moves": "well",
    "forgets_modules": "well",
    "forgets_variables": "well",
    "says_much": "y" * (1000 - len(CUT)) + CUT,
    "says_half": "?",
    "says_bad_text": "well",
    "counts_in_numpy": "well",
    "close_sleep": "well",
    "close_raises": "well",
    "close_vanishes": "well",
}
"""What does no harm: the episode goes on."""

ENDLESS = [name for name, note in FAILURES.items() if note == OVER_TIME]


def pickled(name):
    """How a request has a string that is this name, and not another that contains it."""
    return chr(len(name)) + name


def test_each_costs_its_own_episode(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv(MARK, "1")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    limits.limit(monkeypatch, 1.0, *map(pickled, [*ENDLESS, "close"]))
    names = [*FAILURES, *OBSERVATIONS]
    own_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    monkeypatch.chdir(tmp_path)
    playing = play(f"{MODULE}:Hostile", max_characters=1000)
    playing.check()
    gc.collect()  # What other tests have left.
    files = len(os.listdir("/proc/self/fd"))
    # A well one beside each.
    keys = [key for name in names for key in (name, f"beside {name}")]
    for key in keys:
        playing.begin(key, Problem("", key if key.startswith(("reset_", "close_")) else ""), 0)
    found = answers(playing, *keys)
    going_on = [key for key in keys if not key.startswith("reset_")]
    assert not any(found[key].failed for key in going_on)
    for key in going_on:
        is_well = key.startswith(("beside ", "close_"))
        playing.act(key, "well" if is_well else key)
    found |= answers(playing, *going_on)
    for name, note in FAILURES.items():
        assert found[name].failed and found[name].done, name
        assert found[name].note.startswith(note), (name, found[name].note)
        assert len(found[name].note) <= 300 and "\n" not in found[name].note
    seen = {name: found[name].observation for name in OBSERVATIONS}
    assert seen == OBSERVATIONS and found["counts_in_numpy"].reward == 0.5
    beside = [f"beside {name}" for name in names]
    for _ in range(2):
        for key in [*beside, *OBSERVATIONS]:
            playing.act(key, "well")
        again = answers(playing, *beside, *OBSERVATIONS)
        assert {played.observation for played in again.values()} == {"well"}
    for key in [*beside, *OBSERVATIONS]:
        playing.end(key)
    assert closed(playing)
    # Only the template is left, before anything is killed with it.
    assert gone(MARK, but=1), marked(MARK)
    assert len(os.listdir("/proc/self/fd")) == files
    playing.close()
    assert gone(MARK) and os.listdir() == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - own_peak < 64 << 10  # KiB
    told = capfd.readouterr().err
    assert told.count("warning: the environment own failed: ") == 1


def test_one_that_vanishes_between_two_turns(monkeypatch):
    with started(f"{MODULE}:Hostile", max_characters=1000) as playing:
        playing.begin("a", Problem(""), 0)
        answers(playing, "a")
        playing.act("a", "vanishes_later")
        found = answers(playing, "a")["a"]
        if not found.failed:
            playing.act("a", "well")
            found = answers(playing, "a")["a"]
        assert found.failed and found.note == DIED


@pytest.mark.parametrize("kind", ["class", "function"])
def test_one_that_is_never_built(kind, capfd):
    never = own_environments.NeverBuilt
    with started(never if kind == "class" else lambda: own_environments.NoReset()) as playing:
        for key in range(3):
            playing.begin(key, Problem(""), 0)
        notes = {played.note for played in answers(playing, 0, 1, 2).values()}
    assert (
        notes
        == {
            "class": {"RuntimeError: no board"},
            "function": {"TypeError: NoReset has no method reset(problem, seed)"},
        }[kind]
    )
    assert capfd.readouterr().err.count("Traceback") == 1

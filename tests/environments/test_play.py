"""Episodes of honest environments, each in a process of its own.

Not exercised: hostile ones (test_hostile.py); what of a step is refused (test_step.py).
"""

import random
import threading

import pytest

from tests.environments import own_environments
from tests.environments.playing import answers, closed, play, started
from tests.sandbox import limits
from vapo_megatron.environments.play import Played
from vapo_megatron.errors import ConfigError
from vapo_megatron.reward.verifier import Problem, Verdict

MODULE = "tests.environments.own_environments"
PROBLEM = Problem("A number.", "7")


def timeless(played):
    assert 0 <= played.seconds < 60
    return played._replace(seconds=0.0)


def test_a_game_to_its_end():
    with started(f"{MODULE}:GuessTheNumber") as playing:
        playing.begin("game", PROBLEM, 3)
        begun = answers(playing, "game")["game"]
        assert timeless(begun) == Played("A number. Guess!")
        number = random.Random(3).randint(1, 7)
        for guess, hint in ((0, "higher"), (8, "lower")):
            playing.act("game", str(guess))
            played = timeless(answers(playing, "game")["game"])
            assert played == Played([{"role": "user", "content": hint}], -0.25)
        playing.act("game", str(number))
        won = timeless(answers(playing, "game")["game"])
        assert won == Played("", 1.0, True, Verdict("correct", note="after 3"), "")
        # The key is free, although the environment may still be closing.
        playing.begin("game", PROBLEM, 3)
        assert timeless(answers(playing, "game")["game"]) == timeless(begun)


@pytest.mark.parametrize("kind", ["file", "class", "of no module", "instance", "function", "name"])
def test_an_environment_may_be_given_in_many_ways(kind, tmp_path):
    class Own(own_environments.GuessTheNumber):
        pass

    file = tmp_path / "game.py"
    file.write_text(f"from {MODULE} import GuessTheNumber as Game")
    given, options = {
        "file": (f"{file}:Game", {"lowest": 7}),
        "class": (own_environments.GuessTheNumber, {"lowest": 7}),
        "of no module": (Own, {"lowest": 7}),
        "instance": (own_environments.GuessTheNumber(7), {}),
        "function": (own_environments.guessing, {"lowest": 7}),
        "name": (f"{MODULE}:guessing", {"lowest": 7}),
    }[kind]
    with started(given, options) as playing:
        for key in "ab":
            playing.begin(key, PROBLEM, 0)
        answers(playing, *"ab")
        playing.act("a", "8")
        answers(playing, "a")
        for key in "ab":
            playing.act(key, "7")
        notes = {key: p.verdict.note for key, p in answers(playing, *"ab").items()}
    assert notes == {"a": "after 2", "b": "after 1"}


def test_many_episodes_at_once_each_with_its_own_number():
    with started(f"{MODULE}:GuessTheNumber", at_once=16) as playing:
        highest = Problem("A number.", "1000")
        for key in range(200):
            playing.begin(key, highest, key)
        answers(playing, *range(200))
        for key in range(200):
            playing.act(key, str(random.Random(key).randint(1, 1000)))
        assert all(played.verdict.is_correct for played in answers(playing, *range(200)).values())
        assert closed(playing)


def test_draws_that_nobody_seeds_follow_the_episodes_seed():
    with started(f"{MODULE}:Draws") as playing:
        for key, seed in (("a", 1), ("b", 2), ("c", 1)):
            playing.begin(key, PROBLEM, seed)
        drawn = {key: played.observation for key, played in answers(playing, *"abc").items()}
    assert drawn["a"] == drawn["c"] != drawn["b"]
    assert all(a != b for a, b in zip(drawn["a"].split(), drawn["b"].split(), strict=True))


def test_an_environment_is_closed_after_its_last_answer_an_end_and_an_error(tmp_path):
    with started(f"{MODULE}:Closes") as playing:
        for action in ("end", "raise", "none"):
            file = tmp_path / action
            playing.begin(action, Problem("", str(file)), 0)
            answers(playing, action)
            if action != "none":
                playing.act(action, action)
                answers(playing, action)
            assert not file.exists() or action != "none"
            playing.end(action)  # Of one that has ended nothing comes.
            assert closed(playing) and file.read_text() == "closed\n"


def test_a_call_that_nobody_waits_for_any_more_is_ended(monkeypatch):
    limits.limit(monkeypatch, 600.0)
    with started(f"{MODULE}:Hostile") as playing:
        for key in "ab":
            playing.begin(key, Problem(""), 0)
        answers(playing, *"ab")
        playing.act("a", "sleep")
        playing.act("b", "well")
        playing.end("a")
        playing.begin("a", Problem(""), 0)
        found = answers(playing, *"ab")
        assert (found["a"].observation, found["b"].observation) == ("", "well")


def test_scores_are_verdicts_where_they_have_a_range():
    class Scores:
        def reset(self, problem, seed):
            pass

        def step(self, action):
            from vapo_megatron.environments import Step

            return Step(done=True, verdict=float(action))

    with started(Scores, full_score=0.5) as playing:
        for key in ("0.25", "0.75"):
            playing.begin(key, PROBLEM, 0)
        answers(playing, "0.25", "0.75")
        for key in ("0.25", "0.75"):
            playing.act(key, key)
        verdicts = {key: p.verdict for key, p in answers(playing, "0.25", "0.75").items()}
    assert verdicts == {"0.25": Verdict("wrong", 0.25), "0.75": Verdict("correct", 0.75)}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such_module:A", {}, "own cannot be loaded: ModuleNotFoundError: No module named 'no_"),
        (f"{MODULE}:Absent", {}, "has no attribute 'Absent'"),
        (f"{MODULE}:GuessTheNumber", {"least": 3}, "TypeError: got an unexpected keyword argument"),
        (f"{MODULE}:NoReset", {}, r"TypeError: NoReset has no method reset\(problem, seed\)"),
        (own_environments.GuessTheNumber(), {"lowest": 3}, "is built already, and takes no opti"),
        (own_environments.Explodes(), {}, "RuntimeError: unpickled .*own_environments.py"),
    ],
)
def test_what_does_not_load_is_the_users_mistake(name, options, message):
    with started(name, options) as playing:
        with pytest.raises(ConfigError, match=message):
            playing.check()


def test_what_cannot_be_pickled_is_the_users_mistake():
    holds_a_lock = own_environments.GuessTheNumber()
    holds_a_lock.lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to the processes that play"):
        play(holds_a_lock)

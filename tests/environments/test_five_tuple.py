"""Environments of Gymnasium's API, in the processes that play episodes.

Not exercised: GEM's games, which test_adapters.py downloads.
"""

import contextlib

import gymnasium
import pytest

from tests.environments.playing import answers, started
from vapo_megatron.environments.five_tuple import FiveTuple
from vapo_megatron.environments.named import resolve
from vapo_megatron.reward.verifier import Problem

MODULE = "tests.environments.text_environments"


@pytest.fixture
def play():
    """Make a Play of the built-in environment `gymnasium`."""
    name = "gymnasium"
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(started(resolve(name), options, name=name))


PROBLEM = Problem("Guess.", "7", {"level": 3})


def acted(playing, seed, *actions, problem=PROBLEM):
    """Play an episode -> (observation, reward, done, note) of the reset and of each action."""
    playing.begin("a", problem, seed)
    found = []
    for action in (None, *actions):
        if action is not None:
            playing.act("a", action)
        played = answers(playing, "a")["a"]
        assert played.verdict is None
        found.append((played.observation, played.reward, played.done, played.note))
    playing.end("a")
    return found


def number(seed):
    generator, _ = gymnasium.utils.seeding.np_random(seed)
    return int(generator.integers(1, 8))


def test_a_game_to_its_end(play):
    playing = play(id=f"{MODULE}:Warmer-v0", options={"highest": 7})
    for seed in range(4):
        right = number(seed)
        wrong = right % 7 + 1
        found = acted(playing, seed, str(wrong), str(right))
        hint = "lower" if wrong > right else "higher"
        assert found == [
            ("A number up to 7. ", 0.0, False, ""), (hint, -0.1, False, ""),
            ("right", 1.0, True, ""),
        ]  # fmt: skip
    assert len({number(seed) for seed in range(4)}) > 1


def test_a_truncated_one_is_over_and_says_so(play):
    playing = play(id=f"{MODULE}:Warmer-v0")
    *_, last = acted(playing, 0, "0", "0", "0")
    assert last == ("higher", -0.1, True, "truncated by the environment")


def test_columns_of_the_row_reach_reset(play):
    playing = play(entry=f"{MODULE}:Warmer", columns=["level", "answer"])
    assert acted(playing, 0)[0][0] == "A number up to 10. {'level': 3, 'answer': '7'}"
    lacking = acted(playing, 0, problem=Problem("Guess.", "7"))
    assert lacking[0][2:] == (True, "KeyError: 'level'")


def test_what_frames_an_observation_is_part_of_it(play):
    playing = play(entry=f"{MODULE}:Framed")
    assert acted(playing, 0, "hello", "end") == [
        ("begin\nGo on.", 0.0, False, ""),
        ("> hello\nGo on.", 0.0, False, ""),
        ("> end\nGo on.", 0.0, True, "truncated by the environment"),
    ]


def test_seeds_have_32_bits_and_draws_follow_them(play):
    playing = play(entry=f"{MODULE}:Drawn")
    one, same, other = (acted(playing, seed)[0][0] for seed in (2**40 + 5, 2**40 + 5, 6))
    assert one == same and one.startswith("5 ") and other.split()[1] != one.split()[1]


def test_what_is_no_text_ends_the_episode(play):
    playing = play(entry=f"{MODULE}:Framed")
    *_, last = acted(playing, 0, "number")
    assert last[2] and last[3].startswith("step's observation=5 must be text")


@pytest.mark.parametrize("given", [{}, {"id": "Warmer-v0", "entry": f"{MODULE}:Warmer"}])
def test_one_of_id_and_entry_is_needed(given):
    with pytest.raises(ValueError, match="exactly one of them must be given"):
        FiveTuple(**given)


def test_an_unknown_id_is_named(play):
    playing = play(id="NoSuchGame-v0")
    assert "NoSuchGame" in acted(playing, 0)[0][3]


def test_a_rows_seed_is_the_same_for_all_of_a_group(play):
    playing = play(entry=f"{MODULE}:Drawn")
    row = Problem("Guess.", "7", {"seed": 5})
    assert [acted(playing, seed, problem=row)[0][0][:2] for seed in (1, 2)] == ["5 ", "5 "]
    for own in (True, "5", None):
        other = Problem("Guess.", "7", {"seed": own})
        assert acted(playing, 3, problem=other)[0][0].startswith("3 ")

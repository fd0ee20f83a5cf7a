"""Turns without an engine: how many episodes are played at a time, and what ends one.

With engines, and that answers change no token: tests/rollout/vllm/test_turns.py.
"""

import dataclasses
from array import array

from vapo_megatron.data.rollout import Episode, Prompt, Rollout, Turn
from vapo_megatron.rollout.requests import Request, Work
from vapo_megatron.rollout.turns import Answer, Limits, Turns

LIMITS = Limits(max_turns=3, max_action_tokens=4, max_tokens=12)


class Players:
    """Answers what a test says, as soon as it is asked for."""

    def __init__(self, *said):
        self.said, self.asked, self.most, self.alive = said, [], 0, set()

    def ask(self, rollout, seed):
        self.asked.append((rollout, seed))
        self.alive.add(rollout.position)
        self.most = max(self.most, len(self.alive))

    def answers(self, wait_seconds):
        found = []
        for rollout, _ in self.asked:
            turn = len(rollout.turns) + bool(rollout.token_ids)
            said = self.said[turn]._replace(position=rollout.position)
            if not turn:  # What is said first is in the prompt.
                said = said._replace(ids=(), prompt={"token_ids": (1, 2, 3)})
            found.append(said)
        self.asked = []
        return found

    def finish(self, rollout):
        self.alive.remove(rollout.position)
        return dataclasses.replace(rollout, policy_version=9)


def played(players, *, count=1, at_once=8, sampled=(2,), truncated=False):
    """Finished episodes, the requests that were made, and the Turns.

    sampled: tokens of each turn; the last number goes on.
    """
    prompt = Prompt(0, "?", (1, 2), "7")
    requests = [Request(Rollout.empty(prompt, i, i, 3), 100 + i) for i in range(count)]
    parts, ended, made = iter([requests]), [], []
    turns = Turns(
        Work(lambda room: next(parts, []), ended.append, count), players, lambda value: value,
        LIMITS, at_once,
    )  # fmt: skip
    work = turns.work
    assert work.take(at_once) == []
    while work.waiting.number():
        for request in work.waiting.back(True):
            made.append(request)
            number = len(request.rollout.turns)
            length = min(sampled[min(number, len(sampled) - 1)], request.max_tokens)
            new = array("i", [7] * length)
            logprobs = array("f", [0.0] * length)
            work.ended(request.rollout.extended(new, logprobs, 3, truncated=truncated))
        work.take(at_once)
    return ended, made, turns


GOES_ON = Answer(0, (5,), 0.5)
OVER = Answer(0, (), 1.0, is_over=True)


def test_no_more_than_so_many_are_played_at_a_time():
    players = Players(GOES_ON, OVER)
    ended, _, _ = played(players, count=20, at_once=3)
    assert players.most == 3 and not players.alive
    assert [r.position for r in ended] == list(range(20))
    assert {r.policy_version for r in ended} == {9}, "as the players have it"


def test_an_episode_ends_where_the_environment_says():
    ended, made, turns = played(Players(GOES_ON, GOES_ON, OVER))
    (rollout,) = ended
    assert rollout.turns == (Turn(2, 0.5), Turn(4, 1.0)) and not rollout.truncated
    assert rollout.prompt == Prompt(0, "?", (1, 2, 3), "7")
    assert rollout.inserted == ((2, array("i", [5])),) and rollout.episode is None
    assert [(r.seed, r.max_tokens) for r in made] == [(100, 4)] * 2
    assert turns.idle_seconds > 0


def test_it_is_cut_where_turns_run_out():
    (rollout,), _, _ = played(Players(*[GOES_ON] * 4))
    assert rollout.episode == Episode("environment.max_turns") and rollout.truncated
    assert rollout.turns == (Turn(2, 0.5), Turn(4, 0.5), Turn(6, 0.5))
    assert [before for before, _ in rollout.inserted] == [2, 4], "nobody sees the last one"


def test_it_is_cut_where_an_observation_leaves_no_room():
    long = Answer(0, (5,) * 8, 0.5)
    (rollout,), _, _ = played(Players(GOES_ON, long), sampled=(4,))
    assert rollout.episode == Episode("rollout.max_response_tokens") and rollout.truncated
    assert not rollout.inserted, "nobody sees it"
    assert rollout.turns == (Turn(4, 0.5),)


def test_it_is_cut_where_an_action_is_too_long():
    (rollout,), _, _ = played(Players(GOES_ON, OVER), sampled=(9,), truncated=True)
    assert rollout.episode == Episode("environment.max_action_tokens")
    assert rollout.turns == (Turn(4, 0.0),), "the environment was not asked"


def test_it_is_cut_where_an_action_fills_the_response():
    full = Answer(0, (5,) * 4, 0.5)
    players = Players(GOES_ON, full, GOES_ON)
    (rollout,), _, _ = played(players, sampled=(4, 4), truncated=False)
    assert rollout.episode == Episode("rollout.max_response_tokens")


def test_what_fails_at_the_beginning_is_a_token_long():
    """There is no empty response; its token is all that is sampled."""
    (rollout,), made, _ = played(Players(OVER))
    assert [r.max_tokens for r in made] == [1]
    assert len(rollout.token_ids) == 1 and rollout.turns == (Turn(1, 0.0),)

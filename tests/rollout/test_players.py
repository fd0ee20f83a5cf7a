"""What environments say becomes tokens, and what is kept of an episode becomes its end.

What is played is scripted here; real processes: tests/environments, tests/e2e/test_episodes.py.
"""

import dataclasses
from array import array

import pytest
from transformers import PreTrainedTokenizerFast

from tests.rollout.chat_tokenizer import write_chat_tokenizer
from vapo_megatron.config import RewardConfig
from vapo_megatron.data.rollout import Episode, Prompt, Rollout, Turn
from vapo_megatron.environments.play import Played
from vapo_megatron.reward.verifier import Verdict
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.players import EnvironmentPlayers

STOP = 2  # <|im_end|>
MOST = 40


class Scripted:
    """Play's methods, with answers that a test puts there."""

    def __init__(self):
        self.said, self.calls = [], []

    def begin(self, key, problem, seed):
        self.calls.append(("begin", key, problem.prompt, seed))

    def act(self, key, action):
        self.calls.append(("act", key, action))

    def end(self, key):
        self.calls.append(("end", key))

    def answers(self, wait_seconds):
        found, self.said = self.said, []
        return found


@pytest.fixture
def tokenizer(tmp_path):
    return PreTrainedTokenizerFast.from_pretrained(write_chat_tokenizer(tmp_path))


def players(tokenizer, *, verifier="environment", max_prompt_tokens=200, **reward):
    play = Scripted()
    inputs = Inputs(None, tokenizer, (STOP,))
    found = EnvironmentPlayers(
        play, inputs, RewardConfig(verifier=verifier, **reward),
        max_prompt_tokens=max_prompt_tokens, max_observation_tokens=MOST,
    )  # fmt: skip
    return found, play


def rollout(tokenizer, *actions, turns=(), critic=None):
    text = "<|im_start|>user\nPlay!<|im_end|>\n<|im_start|>assistant\n"
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    prompt = Prompt(0, "Play!", ids, "7", critic_token_ids=critic)
    tokens = array("i")
    for action in actions:
        tokens += array("i", [*tokenizer.encode(action, add_special_tokens=False), STOP])
    return Rollout(prompt, 0, 5, tokens, array("f", [0.0] * len(tokens)), False, 0, turns=turns)


def answered(found, play, asked, played, seed=11):
    found.ask(asked, seed)
    play.said = [(asked.position, played)]
    (answer,) = found.answers(0.0)
    return answer


def begun(tokenizer, **options):
    found, play = players(tokenizer, **options)
    asked = rollout(tokenizer)
    answer = answered(found, play, asked, Played())
    assert answer.prompt == {"token_ids": asked.prompt.token_ids} and not answer.is_over
    assert play.calls == [("begin", 5, "Play!", 11)]
    return found, play


def test_the_first_observation_stands_before_the_generation_prompt(tokenizer):
    found, play = players(tokenizer)
    asked = rollout(tokenizer)
    answer = answered(found, play, asked, Played("A coin."))
    text = tokenizer.decode(answer.prompt["token_ids"])
    assert text == (
        "<|im_start|>user\nPlay!<|im_end|>\n<|im_start|>user\nA coin.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_critic_is_told_it_too(tokenizer):
    found, play = players(tokenizer)
    critic = rollout(tokenizer).prompt.token_ids[1:]
    answer = answered(found, play, rollout(tokenizer, critic=critic), Played("A coin."))
    assert answer.prompt["critic_token_ids"] == answer.prompt["token_ids"][1:]


def test_an_action_is_its_own_text_and_its_answer_the_tail(tokenizer):
    found, play = begun(tokenizer)
    first = rollout(tokenizer, "left")
    one = answered(found, play, first, Played("wall", reward=0.5))
    assert tokenizer.decode(one.ids) == (
        "\n<|im_start|>user\nwall<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (one.reward, one.is_over, one.prompt) == (0.5, False, None)
    second = rollout(tokenizer, "left", "right", turns=(Turn(len(first.token_ids), 0.5),))
    answered(found, play, second, Played("door"))
    assert play.calls[1:] == [("act", 5, "left"), ("act", 5, "right")]


@pytest.mark.parametrize("kwargs", [{"thinks": False}, '{"thinks": false}'])
def test_every_turn_is_prompted_with_the_rows_variables(tokenizer, kwargs):
    quiet = "{{ '' if thinks | default(true) else '<quiet>' }}{% endif %}"
    template, _, end = tokenizer.chat_template.rpartition("{% endif %}")
    tokenizer.chat_template = template + quiet + end
    found, play = players(tokenizer)
    asked = rollout(tokenizer)
    ids = (*asked.prompt.token_ids, *tokenizer.encode("<quiet>"))
    prompt = dataclasses.replace(
        asked.prompt, token_ids=ids, metadata={"chat_template_kwargs": kwargs}
    )
    asked = dataclasses.replace(asked, prompt=prompt)
    first = answered(found, play, asked, Played("A coin."))
    assert tokenizer.decode(first.prompt["token_ids"]).endswith(
        "\n<|im_start|>user\nA coin.<|im_end|>\n<|im_start|>assistant\n<quiet>"
    )
    turn = dataclasses.replace(rollout(tokenizer, "left"), prompt=prompt)
    text = tokenizer.decode(answered(found, play, turn, Played("wall")).ids)
    assert text == "\n<|im_start|>user\nwall<|im_end|>\n<|im_start|>assistant\n<quiet>"


@pytest.mark.parametrize("said", ["x" * 500, [{"role": "user", "content": "x" * 500}]])
def test_a_long_observation_is_cut_and_says_so(tokenizer, said):
    found, play = begun(tokenizer)
    answer = answered(found, play, rollout(tokenizer, "a"), Played(said))
    text = tokenizer.decode(answer.ids).removeprefix("\n<|im_start|>user\n")
    assert text == "x" * MOST + " [cut]<|im_end|>\n<|im_start|>assistant\n"


def test_all_messages_together_have_the_limit(tokenizer):
    found, play = begun(tokenizer)
    said = [{"role": "user", "content": "x" * 30}, {"role": "user", "content": "y" * 30}]
    answer = answered(found, play, rollout(tokenizer, "a"), Played(said))
    text = tokenizer.decode(answer.ids)
    assert text.count("x") == 30 and text.count("y") == MOST - 30 and text.count("[cut]") == 1


def finished(tokenizer, played, *, cut="", turns=(0.5, 0.0), **options):
    """An episode of one action that ended so."""
    found, play = begun(tokenizer, **options)
    action = rollout(tokenizer, "a")
    if played is not None:
        assert answered(found, play, action, played).is_over
    ended = rollout(tokenizer, "a", turns=tuple(Turn(2, reward) for reward in turns))
    if cut:
        ended = Rollout(**{**vars(ended), "truncated": True, "episode": Episode(cut)})
    return found.finish(ended).episode, play


def test_the_environments_verdict(tokenizer):
    verdict = Verdict("correct", note="won")
    episode, play = finished(tokenizer, Played(done=True, verdict=verdict, seconds=0.25))
    assert episode == Episode("", False, 0.25, verdict, False)
    assert ("end", 5) not in play.calls


def test_its_score_is_read_as_a_verifiers(tokenizer):
    options = {"from_score": [0.0, 1.0], "correct_from": 0.6}
    played = Played(done=True, verdict=Verdict("correct", score=0.5))
    episode, _ = finished(tokenizer, played, **options)
    assert episode.verdict.status == "wrong"


@pytest.mark.parametrize(("turns", "status"), [((0.5, 0.0), "correct"), ((0.5, -0.5), "wrong")])
def test_without_a_verdict_its_rewards_are_all(tokenizer, turns, status):
    episode, _ = finished(tokenizer, Played(done=True), turns=turns)
    assert episode.verdict.status == status and episode.is_paid


def test_without_a_verdict_another_verifier_judges(tokenizer):
    episode, _ = finished(tokenizer, Played(done=True), verifier="math")
    assert episode.verdict is None and not episode.is_paid


def test_what_a_limit_cuts_is_ended_and_wrong(tokenizer):
    episode, play = finished(tokenizer, None, cut="environment.max_turns")
    assert episode.cut == "environment.max_turns" and not episode.is_paid
    assert (episode.verdict.status, episode.verdict.note) == (
        "wrong", "cut by environment.max_turns"
    )  # fmt: skip
    assert play.calls[-1] == ("end", 5)


def test_a_failed_call_is_the_episodes(tokenizer):
    episode, _ = finished(tokenizer, Played(done=True, failed=True, note="it exited"))
    assert episode.failed and episode.verdict == Verdict("failed", note="it exited")


def test_what_the_template_refuses_fails(tokenizer):
    found, play = begun(tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    answer = answered(found, play, rollout(tokenizer, "a"), Played("b"))
    assert answer.is_over and play.calls[-1] == ("end", 5)
    episode = found.finish(rollout(tokenizer, "a", turns=(Turn(2, 0.0),))).episode
    assert episode.failed and "refuses them: no" in episode.verdict.note


def test_a_beginning_that_is_too_long_fails(tokenizer):
    found, play = players(tokenizer, max_prompt_tokens=45)
    asked = rollout(tokenizer)
    answer = answered(found, play, asked, Played("x" * 30))
    assert answer.is_over and answer.prompt is None
    ended = rollout(tokenizer, "a", turns=(Turn(2, 0.0),))
    note = found.finish(ended).episode.verdict.note
    assert "tokens, more than rollout.max_prompt_tokens=45" in note


def test_seconds_and_wrong_calls_add_up(tokenizer):
    found, play = begun(tokenizer)
    answered(found, play, rollout(tokenizer, "a"), Played("b", seconds=1.5, failed_calls=2))
    second = rollout(tokenizer, "a", "b", turns=(Turn(2, 0.0),))
    answered(found, play, second, Played(done=True, seconds=2.0, failed_calls=1))
    episode = found.finish(second).episode
    assert (episode.seconds, episode.failed_calls) == (3.5, 3)


def test_dropped_episodes_are_ended(tokenizer):
    found, play = begun(tokenizer)
    found.drop()
    assert play.calls[-1] == ("end", 5)
    begun_again = answered(found, play, rollout(tokenizer), Played())
    assert not begun_again.is_over
